"""The CPU path: compiled code (native.py) where it can be had, else torch's functions.

Arithmetic is float32 for float16, bfloat16 and float32, float64 for float64; results are rounded
once. Dot products are taken in float64, where no square of a float32 under- or overflows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels._known import Known, Place, in_memory
from kernels._recall import SAFE_HIGH, SAFE_LOW
from kernels.cpu import native, torch_fallback
from kernels.gpu.dots import TINY
from kernels.gpu.launcher import mark_written
from kernels.packed_list import PackedList


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in for tensors of `dtypes`."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _native_for(place: Place, wide: torch.dtype, *made: Tensor) -> native.Library | None:
    """The compiled functions, if all is in memory; made: of what `place` may say nothing."""
    if place.in_c and in_memory(made, [*map(Tensor.data_ptr, made)]):
        return native.library(wide)
    return None


def _native_for_packed(listed: PackedList, place: Place, buffer: Tensor) -> native.Library | None:
    """The same for lists, of one dtype."""
    if len(listed.dtype_set) > 1:
        return None
    return _native_for(place, compute_dtype(listed.layout.dtype, *listed.dtype_set), buffer)


def pack(
    tensors: Sequence[Tensor],
    place: Place,
    known: Known[PackedList],
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the tensors into their slots of `out` and zero into the padding."""
    listed = known.value
    if not tensors:
        return
    if native := _native_for_packed(listed, place, out):
        if known.is_met_again:
            known.job = native.copy_job(listed, out, packing=True)
        native.copy(place.in_c, listed, out, scale, found_inf, packing=True)
        mark_written([out], found_inf)
    else:
        torch_fallback.pack(tensors, listed, out, scale, found_inf)


def unpack(
    buffer: Tensor,
    tensors: list[Tensor],
    place: Place,
    known: Known[PackedList],
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """Write the slots of `buffer` into the tensors."""
    listed = known.value
    if not tensors:
        return
    if native := _native_for_packed(listed, place, buffer):
        if known.is_met_again:
            known.job = native.copy_job(listed, buffer, packing=False)
        native.copy(place.in_c, listed, buffer, scale, found_inf, packing=False)
        mark_written(tensors, found_inf)
    else:
        torch_fallback.unpack(buffer, tensors, listed, scale, found_inf)


def sum_n(
    tensors: Sequence[Tensor],
    place: Place,
    known: Known[torch.dtype],
    out: Tensor,
    scale: float,
    found_inf: Tensor | None,
) -> None:
    """out = scale * (t0 + t1 + ...), in list order; `out` may be any of the tensors."""
    if native := _native_for(place, known.value, out):
        if known.is_met_again:
            known.job = native.sum_n_job(len(tensors), tensors[0].dtype, out)
        native.sum_n(place.in_c, len(tensors), tensors[0].dtype, out, scale, found_inf)
        mark_written([out], found_inf)
    else:
        torch_fallback.sum_n(tensors, known.value, out, scale, found_inf)


def scaled_add(
    a: Tensor,
    b: Tensor,
    place: Place,
    known: Known[torch.dtype],
    alpha: float,
    beta: float,
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    """out = alpha*a + beta*b, elementwise; `out` may be a or b."""
    safe = _safe(alpha) and _safe(beta)
    wide = known.value if safe else torch.float64
    if native := _native_for(place, wide, out):
        if safe and known.is_met_again:
            known.job = native.blend_job(a, b, out)
        native.blend(a, b, out, (0, out.numel()), (alpha, beta), found_inf)
        mark_written([out], found_inf)
    else:
        torch_fallback.scaled_add(a, b, alpha, beta, wide, out, found_inf)


def dot_and_norms(a: Tensor, b: Tensor, place: Place, bounds: Sequence[int]) -> list[list[float]]:
    """S rows (a.b, |a|^2, |b|^2) of the flattened segments."""
    if native := _native_for(place, compute_dtype(a.dtype)):
        return native.dot_and_norms(a, b, bounds)
    return torch_fallback.dot_and_norms(a, b, bounds)


def combine(
    a: Tensor,
    b: Tensor,
    place: Place,
    dots: Sequence[Sequence[float]],
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    """out = (1 - d/(2A)) a + (1 - d/(2B)) b a segment, with `dots` S rows (d, A, B)."""
    factors = [(_coefficient(dot, mine), _coefficient(dot, theirs)) for dot, mine, theirs in dots]
    flat = [*itertools.chain.from_iterable(factors)]
    wide = compute_dtype(a.dtype, out.dtype)
    native = _native_for(place, wide, out)
    if native and all(map(_safe, flat)):
        native.blend(a, b, out, bounds, flat, found_inf)
        mark_written([out], found_inf)
        return
    parts = [tensor.detach().view(-1) for tensor in (a, b, out)]
    for (alpha, beta), (low, high) in zip(factors, itertools.pairwise(bounds), strict=True):
        if high > low:
            left, right, to = (part[low:high] for part in parts)
            scaled_add(left, right, place, Known(wide), alpha, beta, to, found_inf)


def _safe(coefficient: float) -> bool:
    return (
        coefficient == 0.0 or SAFE_LOW < abs(coefficient) < SAFE_HIGH or coefficient != coefficient
    )


def _coefficient(dot: float, norm: float) -> float:
    """1 - d/(2A); 1 below sqrt(DBL_MIN), which no NaN is."""
    return 1.0 if norm < TINY else 1.0 - dot / (2.0 * norm)
