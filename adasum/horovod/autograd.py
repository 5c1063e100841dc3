"""Collectives that autograd can go back through, by other collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Returns a result, and a function from the result's gradients to those of the inputs.
Forward: TypeAlias = Callable[..., tuple[Any, Callable[..., Sequence[Tensor | None]]]]


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, *tensors: Tensor) -> Any:
        result, ctx.gradients_of_inputs = forward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients_of_inputs(*gradients)


def recorded(forward: Forward, *tensors: Tensor) -> Any:
    """Return the result of forward(*tensors), recorded where autograd records the tensors."""
    if differentiable(*tensors):
        return _Recorded.apply(forward, *tensors)
    return forward(*tensors)[0]


def differentiable(*tensors: Tensor) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )


def refuse_gradient(function: str, *tensors: Tensor) -> None:
    """Raise NotImplementedError where a gradient would be lost without a word."""
    if differentiable(*tensors):
        raise NotImplementedError(
            f"gradients through {function}_async are not supported: pass tensor.detach(), or call "
            f"{function}"
        )


def backward_name(name: str | None) -> str | None:
    """Return the name of the collective that carries the gradient of `name`."""
    return None if name is None else f"{name}.backward"
