"""Adasum's delta method: every rank takes its own step, and the steps are reduced.

Source: Maleki et al., arXiv 2006.02924, section on optimizers with state: the difference an
optimizer makes is reduced, not the gradient it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adasum.optimizer.buffers import DeltaBuffers, travels
from adasum.optimizer.gradients import Flight, OptimizerOrderError
from adasum.optimizer.parameters import Named
from adasum.optimizer.wire import InFlight
from adasum.optimizer.wrapper import Distributed, densify, forgets_scaler
from collectives import Sum

__all__ = ["DeltaMethod", "InBackward", "steps_by_parameter"]

# One bucket's reduction hides the next one's step; more would only hold more memory.
_IN_FLIGHT = 2
# Those of torch's optimizers whose step treats every parameter by itself.
_BY_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def steps_by_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a step of all parameters is the steps of each, so that buckets can step in turn.

    True for torch's own optimizers except LBFGS and Muon, and for subclasses that keep their step.
    """
    return any(unwrap(known.step) is unwrap(kind.step) for known in _BY_PARAMETER)


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook wants to see the step as a whole."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


class _Delta:
    """A bucket's differences under way; the parameters hold the values from before meanwhile."""

    def __init__(self, flight: InFlight, parameters: list[Tensor], deltas: list[Tensor]) -> None:
        self._flight = flight
        self._parameters = parameters
        self._deltas = deltas

    def wait(self) -> None:
        self._flight.wait()
        with torch.no_grad():
            torch._foreach_add_(self._parameters, self._deltas)

    def report(self) -> None:
        """Shows the reduced difference, which its buffer still holds."""
        self._flight.report()

    def drop(self) -> None:
        """Waits without installing the difference."""
        self._flight.wait()


class DeltaMethod(Distributed):
    """Parameters after the step are before + Adasum over the ranks of (after - before), each.

    The optimizer's state follows each rank's own gradients. Where the optimizer treats every
    parameter by itself, buckets step in turn and copies exist of those under way alone; else of
    the whole model. After an error each parameter has its value from before the step or after it.
    """

    _adasum_before: dict[Tensor, Tensor] | None = None
    _adasum_buffers: DeltaBuffers

    def _prepare(self) -> None:
        self._adasum_buffers = DeltaBuffers(_IN_FLIGHT + 1)

    def synchronize(self) -> None:
        """Nothing to wait for: gradients stay this rank's own, and the step's differences travel.

        It is here so that Horovod's way to clip works: synchronize(), clip, step() within
        skip_synchronize(), which clips this rank's gradients.
        """

    @forgets_scaler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The local step (a closure sees this rank's data), then before + reduced difference."""
        gradients = self._adasum_gradients
        if closure is None:
            self._densify()
        elif self._adasum_sparse_as_dense:
            closure = self._dense(closure)
        answer = None
        if self._adasum_alone:
            answer = self._local_step(closure)
        elif not self._any_rank_skips():
            separable = steps_by_parameter(self._adasum_base) and not _hooked(self)
            if closure is None and separable:
                gradients.synchronize(most=_IN_FLIGHT)
            else:
                answer = self._step_as_a_whole(closure)
        gradients.restart()
        self._adasum_buffers.restart()
        return answer

    def _dense(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._densify()
            return loss

        return evaluate

    def _step_as_a_whole(self, closure: Callable[[], Any] | None) -> Any:
        with torch.no_grad():
            self._adasum_before = {
                parameter: parameter.clone()
                for _, parameter in self._adasum_gradients.named
                if _moves(parameter)
            }
        try:
            answer = self._local_step(closure)
            self._adasum_gradients.synchronize(most=_IN_FLIGHT)
            return answer
        finally:
            with torch.no_grad():
                for parameter, before in self._adasum_before.items():
                    parameter.copy_(before)
            self._adasum_before = None

    def _any_rank_skips(self) -> bool:
        """Under GradScaler: whether any rank's gradients hold a non-finite value."""
        found = self.__dict__.get("found_inf")
        if found is None or self._adasum_group is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self._adasum_group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    @torch.no_grad()
    def _send(self, members: Sequence[Named], label: str) -> Flight | None:
        whole = self._adasum_before
        moving = [
            (name, parameter)
            for name, parameter in members
            if (_moves(parameter) if whole is None else parameter in whole)
        ]
        if not moving:
            return None
        names, parameters = zip(*moving, strict=True)
        values = [parameter.detach() for parameter in parameters]
        if travels(values[0]):
            saved, fused = self._adasum_buffers.of(label, parameters)
            before, deltas, tensors = saved.views, fused.views, fused.tensors
        else:
            before, deltas = ([torch.empty_like(value) for value in values] for _ in range(2))
            tensors = deltas
        if whole is None:
            torch._foreach_copy_(before, values)
            with self._only(parameters):
                self._local_step()
        else:
            before = [whole.pop(parameter) for parameter in parameters]
        torch._foreach_copy_(deltas, values)
        torch._foreach_sub_(deltas, before)
        torch._foreach_copy_(values, before)
        flight = self._adasum_wire.reduce_async(names, tensors, label)
        return _Delta(flight, values, deltas)

    @contextmanager
    def _only(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """The optimizer has no other parameters meanwhile."""
        wanted = set(parameters)
        whole = self.param_groups
        parts = [
            {**group, "params": [each for each in group["params"] if each in wanted]}
            for group in whole
        ]
        self.param_groups = [part for part in parts if part["params"]]
        try:
            yield
        finally:
            self.param_groups = whole


class InBackward(DeltaMethod):
    """The same, with each bucket's local step taken as soon as backward has its gradients.

    So reductions overlap with backward, for what they hold: a copy of each parameter under way.
    Nothing can be done to the gradients between backward and step().
    """

    def _prepare(self) -> None:
        self._adasum_buffers = DeltaBuffers(None)

    def synchronize(self) -> None:
        """OptimizerOrderError: clipping would come too late."""
        raise OptimizerOrderError(
            "synchronize() makes no sense with step_in_backward=True: the local steps are taken "
            "while backward runs, before gradients could be clipped"
        )

    @forgets_scaler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the steps that backward left over, and installs all reduced differences."""
        if "found_inf" in self.__dict__:
            raise OptimizerOrderError(
                "GradScaler cannot be used with step_in_backward=True: the local steps were taken "
                "with scaled gradients"
            )
        if self._adasum_alone:
            return super().step(closure)
        answer = None
        if closure is not None:
            with torch.enable_grad():
                answer = closure()
        self._adasum_gradients.synchronize()
        self._adasum_gradients.restart()
        self._adasum_buffers.restart()
        return answer

    def _send(self, members: Sequence[Named], label: str) -> Flight | None:
        if _hooked(self):
            raise OptimizerOrderError(
                "step hooks cannot be used with step_in_backward=True: each bucket has a step of "
                "its own, and they would run for every one; pass step_in_backward=False"
            )
        if self._adasum_sparse_as_dense:
            for _, parameter in members:
                densify(parameter)
        return super()._send(members, label)


def _moves(parameter: Tensor) -> bool:
    # Optimizers step by the gradient, also one left over from before the parameter was frozen.
    return parameter.requires_grad or parameter.grad is not None


# torch wraps the step of any optimizer class not so marked, and would run step hooks twice.
vars(DeltaMethod)["step"].hooked = True
vars(InBackward)["step"].hooked = True
