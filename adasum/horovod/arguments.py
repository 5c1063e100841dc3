"""Checks and conversions of arguments that Horovod's functions share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from adasum.compression import Compressor
from collectives import Average, Group, Reducer, Sum


class ReductionOptions(NamedTuple):
    """What a reduction is beside its tensors."""

    group: Group
    op: Reducer
    name: str | None
    compression: type[Compressor]
    prescale: float
    postscale: float


def require(argument: str, value: object, *types: type) -> None:
    """Raise TypeError unless the value has one of the types; a bool is not an int."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(each.__name__ for each in types)
        raise TypeError(f"{argument} must be of type {names}, not {type(value).__name__}")


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor; raise for what is not a dense, initialised tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ValueError("tensor is an uninitialised parameter: call its module once first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense, not {tensor.layout}: pass tensor.to_dense()")
    return tensor


def tensor_list(tensors: object) -> list[Any]:
    """Return the tensors as a list; refuse a single tensor, which iterates over its rows."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of tensors, not {type(tensors).__name__}")
    return list(tensors)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, detached from autograd."""
    return dense(tensor).detach().clone(memory_format=torch.contiguous_format)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor detached and contiguous, copied only where it is not already."""
    return dense(tensor).detach().resolve_conj().resolve_neg().contiguous()


def operation(op: Reducer | None, average: bool | None = None) -> Reducer:
    """Return the reducer that `op`, or Horovod's deprecated `average`, asks for."""
    if average is not None:
        if not isinstance(average, bool | int):
            raise TypeError(f"average must be a bool, not {type(average).__name__}")
        if op is not None:
            raise ValueError("the op parameter supersedes average: give only op")
        warnings.warn(
            "parameter average is deprecated: use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, Reducer):
        raise TypeError(f"op must be Sum, Average or Adasum, not {op!r}")
    return op


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


def numbered(name: str | None, i: int) -> str | None:
    """Return the name of the i-th tensor's collective."""
    return None if name is None else f"{name}.{i}"
