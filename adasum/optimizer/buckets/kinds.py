"""What a tensor's place in a buffer depends on: dtype, device, shape and strides.

What users hold may change between two steps under the same object: `.data = ...`, `model.half()`,
another memory format. So a buffer remembers the kinds that it was made for, is compared with them
before each use, and made anew where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasum.real_pairs import as_reals
from collectives import FusedBuffer


class Kind(NamedTuple):
    """What a tensor's place in a buffer depends on."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]


def kind_of(tensor: Tensor) -> Kind:
    """Return the kind of a dense tensor."""
    return Kind(tensor.dtype, tensor.device, tensor.shape, tensor.stride())


def version_of(tensor: Tensor) -> int | None:
    """Return a number that every change in place raises; None where torch counts none."""
    return None if tensor.is_inference() else tensor._version


def state_of(gradient: Tensor | None, counts: bool = True) -> tuple[Any, ...]:
    """Return what differs once somebody has changed a gradient, in place too where that counts."""
    if gradient is None:
        return (None,)
    address = gradient.data_ptr() if gradient.layout is torch.strided else None
    return gradient, address, version_of(gradient) if counts else None


def same_state(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two answers of `state_of` are of one gradient, which nobody has changed."""
    return one[0] is other[0] and one[1:] == other[1:]


def describe_kind(tensor: Tensor) -> str:
    """Return the tensor's kind in words."""
    dtype, device, shape, stride = kind_of(tensor)
    return f"{dtype} of shape {tuple(shape)} with strides {stride} on {device}"


def kind_of_gradient(parameter: Tensor) -> Kind:
    """Return the kind of the parameter's gradient, whose dtype may be another (`grad_dtype`)."""
    kind = kind_of(parameter)
    dtype = dtype_of_gradient(parameter)
    return kind if dtype is kind.dtype else kind._replace(dtype=dtype)


def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the gradient that the parameter has, or would have."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def buffer_for(
    parameters: Sequence[Tensor], kinds: Sequence[Kind], memory: Tensor | None = None
) -> FusedBuffer:
    """Return a buffer for tensors like the parameters, or of their kinds where that is another."""
    likes = [
        parameter.detach()
        if parameter.dtype is kind.dtype
        else torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)
        for parameter, kind in zip(parameters, kinds, strict=True)
    ]
    return FusedBuffer(list(map(as_reals, likes)), memory)
