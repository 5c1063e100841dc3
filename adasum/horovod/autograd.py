"""Gradients of collectives for autograd: other collectives compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from adasum.handle import Handle

# The result of the operation.
T = TypeVar("T")
# Maps the gradients of a result to gradients of the inputs.
Backward: TypeAlias = Callable[..., Sequence[Tensor | None]]


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Callable[[], Any], backward: Backward, *tensors: Tensor) -> Any:
        ctx.gradients_of_inputs = backward
        return result()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.gradients_of_inputs(*gradients)


def with_gradient(
    handle: Handle[T], backward_from: Callable[[Any], Backward], *tensors: Tensor
) -> Handle[T]:
    """Return a handle whose result has gradients if autograd records the tensors.

    The result of `handle` must be a new tensor, or a tuple or list of new tensors. `backward_from`
    is called with it; the function that it returns must not keep a reference to the result.
    """
    if not differentiable(*tensors):
        return handle
    recorded: list[Any] = []

    def finish(result: Any) -> Any:
        if not recorded:
            many = isinstance(result, list)
            with torch.enable_grad():
                outputs = _Recorded.apply(
                    lambda: tuple(result) if many else result, backward_from(result), *tensors
                )
            recorded.append(list(outputs) if many else outputs)
        return recorded[0]

    return Handle([handle], finish)


def differentiable(*tensors: Tensor) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def refuse_gradient(call: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError if a gradient would be lost silently."""
    if differentiable(*tensors):
        fix = "pass tensor.detach()"
        raise NotImplementedError(f"gradients through {call} are not supported: {fix}")


def refuse_recorded(call: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError if autograd would miss the overwriting of a tensor.

    Parameters, other leaves and views of them are allowed, because no recorded operation has made
    them.
    """
    made = [each for each in tensors if isinstance(each, Tensor) and not each.is_leaf]
    made = [each for each in made if each._base is None or not each._base.is_leaf]
    refuse_gradient(f"{call}, in place (use {call.rstrip('_')}),", *made)


def backward_name(name: str | None) -> str | None:
    """Return the name of the collective that carries the gradient of `name`."""
    return None if name is None else f"{name}.backward"
