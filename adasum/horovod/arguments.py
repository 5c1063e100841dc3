"""Checks and conversions of arguments that Horovod's functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from collectives import validation


def require(argument: str, value: object, *types: type) -> None:
    """Raise TypeError unless the value has one of the types; a bool is not an int."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(each.__name__ for each in types)
        raise TypeError(f"{argument} must be of type {names}, not {type(value).__name__}")


def dense(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Return the tensor; raise for what is not a dense, initialised tensor in memory."""
    validation.no_mode(argument)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, not {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ValueError(f"{argument} is an uninitialised parameter: call its module once first")
    validation.plain(argument, tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{argument} must be dense, not {tensor.layout}: pass its to_dense()")
    return tensor


def tensor_list(tensors: object) -> list[Any]:
    """Return the tensors as a list; refuse a single tensor, which iterates over its rows."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of tensors, not {type(tensors).__name__}")
    return list(tensors)


def copied(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Return a contiguous copy, detached from autograd."""
    return dense(tensor, argument).detach().clone(memory_format=torch.contiguous_format)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor detached and contiguous, copied only where it is not already."""
    return dense(tensor).detach().resolve_conj().resolve_neg().contiguous()


def for_each(
    function: Callable[..., Any], tensors: object, name: str | None, *rest: object
) -> list[Any]:
    """Call the function with each tensor, its number added to the name.

    All are checked before the first call, so that no rank makes a part of the calls.
    """
    checked = [dense(each, f"tensors[{i}]") for i, each in enumerate(tensor_list(tensors))]
    for i, each in enumerate(checked):
        if not each.dim():
            raise ValueError(f"tensors[{i}] must have a first dimension: use reshape(1)")
    return [
        function(each, None if name is None else f"{name}.{i}", *rest)
        for i, each in enumerate(checked)
    ]
