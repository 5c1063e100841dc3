"""torch's hooks on an optimizer's parameters: called before and after a gradient is accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.errors import swapped


class ParameterHooks:
    """Hooks on parameters, removed when this is dropped.

    `after` is called with a parameter when backward has accumulated its gradient, `before` when the
    accumulation begins, with one for which `wants_before`. They must hold neither an optimizer nor
    a parameter: torch's hooks are seen by no garbage collector.
    """

    def __init__(
        self,
        after: Callable[[Tensor], None],
        before: Callable[[Tensor], None],
        wants_before: Callable[[Tensor], bool],
    ) -> None:
        self._after = after
        self._before = before
        self._wants_before = wants_before
        self._handles: dict[Tensor, list[RemovableHandle]] = {}
        # Those for which `before` is called.
        self._by_id: dict[int, Tensor] = {}
        # What accumulates a parameter's gradient: another where torch has swapped the parameter.
        self._accumulators: dict[Tensor, Node] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._handles

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Put hooks on trainable parameters that have none."""
        # Who holds an accumulator holds on to the stream that it was made on.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        for parameter in parameters:
            handles = [parameter.register_post_accumulate_grad_hook(self._after)]
            if self._wants_before(parameter):
                self._by_id[id(parameter)] = parameter
                handles.append(parameter.register_hook(_before_accumulation(self, parameter)))
            self._handles[parameter] = handles
            for handle in handles:
                weakref.finalize(self, handle.remove)
            if swaps:
                self._accumulators[parameter] = get_gradient_edge(parameter).node

    def comes_again(self, parameter: Tensor) -> bool:
        """Return whether `after`, which is being called, will be once more in this accumulation.

        That is behind hooks that others have put on the parameter since. What they write through
        `.data` to a gradient that is being reduced torch counts nowhere.
        """
        hooks: Any = parameter._post_accumulate_grad_hooks
        number = self._handles[parameter][0].id if parameter in self._handles else None
        if number not in hooks or next(reversed(hooks)) == number:
            return False
        # Not move_to_end(): autograd reads it as a dict, in the order of insertion.
        hooks[number] = hooks.pop(number)
        after = self._after

        def behind(*_: object) -> None:
            handle.remove()
            after(parameter)

        handle = get_gradient_edge(parameter).node.register_hook(behind)
        return True

    def remove(self, parameter: Tensor) -> None:
        """Remove a parameter's hooks, if it has any."""
        self._accumulators.pop(parameter, None)
        self._by_id.pop(id(parameter), None)
        for handle in self._handles.pop(parameter, []):
            handle.remove()

    def refuse_swapped(self, named: Sequence[Named]) -> None:
        """Raise where torch has put other tensors behind the parameters, without their hooks."""
        if not torch.__future__.get_swap_module_params_on_conversion():
            return
        for name, parameter in named:
            accumulator = self._accumulators.get(parameter)
            if accumulator is None or not parameter.requires_grad:
                continue
            if get_gradient_edge(parameter).node != accumulator:
                raise swapped(name)


def _before_accumulation(
    hooks: ParameterHooks, parameter: Tensor
) -> Callable[[Tensor | None], None]:
    """Return a hook of the parameter, after which its next accumulation calls `hooks._before`.

    A parameter's hook is called by torch.autograd.grad, too, which accumulates nothing, and before
    hooks of users that look at its gradient. So its accumulator is asked, which is held no longer
    than backward needs it: it would insist on the parameter's shape.
    """
    reference, number = weakref.ref(hooks), id(parameter)

    # Compiled autograd traces hooks.
    @torch.compiler.disable
    def on_gradient(gradient: Tensor | None) -> None:
        hooks = reference()
        if hooks is None or gradient is None or number not in hooks._by_id:
            return
        parameter, before = hooks._by_id[number], hooks._before

        def on_accumulation(_: object) -> None:
            handle.remove()
            before(parameter)

        handle = get_gradient_edge(parameter).node.register_prehook(on_accumulation)

    return on_gradient
