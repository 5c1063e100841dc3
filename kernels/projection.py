"""dot_and_norms, combine and adasum: the pairwise projection of Adasum, a segment at a time.

With d = a.b, A = |a|^2 and B = |b|^2 over one segment,
adasum(a, b) = (1 - d/(2A)) a + (1 - d/(2B)) b  (arXiv 2006.02924, section 3): parallel vectors
average, orthogonal ones sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels._known import Known, KnownCalls, Place, place_of
from kernels.cpu import dispatch
from kernels.gpu import launcher, projection_kernels
from kernels.gpu.dots import TINY
from kernels.torch_ops import call, operator, returns_nothing, tracing
from kernels.validation import (
    check_dots,
    check_found_inf,
    check_like,
    check_no_overlap,
    check_pair,
    check_segments,
    check_sized,
    check_tensor,
    new_like,
)


def coefficients(dots: Tensor) -> Tensor:
    """float64 [S, 2] rows (1 - d/(2A), 1 - d/(2B)) of the rows (d, A, B) of `dots`.

    A coefficient whose squared norm is below sqrt(DBL_MIN) is 1; a NaN norm is not, so NaN stays.
    """
    norms = dots[:, 1:]
    return torch.where(norms < TINY, 1.0, 1.0 - dots[:, :1] / (2.0 * norms))


def _no_dots(a: Tensor, b: Tensor, bounds: Sequence[int]) -> Tensor:
    return a.new_empty((len(bounds) - 1, 3), dtype=torch.float64)


@operator("dot_and_norms(Tensor a, Tensor b, SymInt[] bounds) -> Tensor", fake=_no_dots)
def _run_dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int]) -> Tensor:
    return _dot_and_norms(a, b, bounds, Known(None).found_apart((a, b), 2))


def _dot_and_norms(a: Tensor, b: Tensor, bounds: Sequence[int], place: Place) -> Tensor:
    if launcher.on_triton(a):
        return projection_kernels.dot_and_norms(a, b, tuple(bounds))
    rows = dispatch.dot_and_norms(a, b, place, bounds)
    return torch.from_numpy(np.array(rows, dtype=np.float64).reshape(-1, 3))


@operator(
    "combine(Tensor a, Tensor b, Tensor dots, SymInt[] bounds, Tensor(a!) out, "
    "Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    place = place_of((a, b), Known(None), out, found_inf, _A_OR_B)
    _combine(a, b, dots, bounds, out, found_inf, place)


def _combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None,
    place: Place,
) -> None:
    check_no_overlap("out", out, "dots", dots)
    if launcher.on_triton(a):
        projection_kernels.combine(a, b, dots, tuple(bounds), out, found_inf)
    else:
        dispatch.combine(a, b, place, dots.tolist(), bounds, out, found_inf)


@operator(
    "adasum(Tensor a, Tensor b, SymInt[] bounds, Tensor(a!) out, Tensor(b!)? found_inf) -> ()",
    fake=returns_nothing,
)
def _run_adasum(
    a: Tensor,
    b: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None,
) -> None:
    place = place_of((a, b), Known(None), out, found_inf, _A_OR_B)
    _adasum(a, b, bounds, out, found_inf, place)


def _adasum(
    a: Tensor,
    b: Tensor,
    bounds: Sequence[int],
    out: Tensor,
    found_inf: Tensor | None,
    place: Place,
) -> None:
    if launcher.on_triton(a):
        projection_kernels.adasum(a, b, tuple(bounds), out, found_inf)
    else:
        rows = dispatch.dot_and_norms(a, b, place, bounds)
        dispatch.combine(a, b, place, rows, bounds, out, found_inf)


class _Cut(NamedTuple):
    """The segments last given, if they cannot change, and their boundaries."""

    given: object
    bounds: tuple[int, ...]


# How messages call the inputs.
_A_OR_B = "ab".__getitem__
_DOTS: KnownCalls[_Cut] = KnownCalls()
_COMBINES: KnownCalls[_Cut] = KnownCalls()
_ADASUMS: KnownCalls[_Cut] = KnownCalls()


def _cut(segments: Sequence[int] | None, a: Tensor) -> _Cut:
    bounds = check_segments(segments, a.numel())
    lasting = segments is None or type(segments) is tuple
    return _Cut(segments if lasting else _Cut, bounds)


def _bounds(known: Known[_Cut], segments: Sequence[int] | None, a: Tensor) -> tuple[int, ...]:
    """The boundaries of segments that a known call may not have."""
    cut = known.value
    if cut.given is not segments:
        cut = known.value = _cut(segments, a)
    return cut.bounds


def dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """float64 [S, 3] on the tensors' device, rows (a.b, |a|^2, |b|^2) a segment.

    a, b: equal in shape, dtype and device, taken as flat. segments: element boundaries
    (0, ..., numel), None for one segment; an empty segment gives zeros. No square under- or
    overflows for float16, bfloat16 or float32 values. Raises TypeError or ValueError.
    """

    def check() -> _Cut:
        return _cut(segments, check_pair(a, b, None))

    if tracing():
        dots: Tensor = call("dot_and_norms", a, b, check().bounds)
        return dots
    known, place = _DOTS.checked(check, None, (a, b))
    place = place or known.found_apart((a, b), 2)
    return _dot_and_norms(a, b, _bounds(known, segments, a), place)


def combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """(1 - d/(2A)) a + (1 - d/(2B)) b a segment, with (d, A, B) the rows of `dots`.

    dots: float64 [S, 3], as `dot_and_norms` returns or summed over the ranks that hold the
    segments' parts. A coefficient whose squared norm is below sqrt(DBL_MIN) is 1. out: written
    and returned; may be a or b. found_inf: float32 of one element, set to 1 where an output is
    not finite, else left. Rounded once to the dtype. Raises TypeError or ValueError before
    anything is written.
    """

    def check() -> _Cut:
        left = check_tensor("a", a)
        cut = _cut(segments, left)
        check_dots(dots, len(cut.bounds) - 1, left)
        check_pair(a, b, out)
        check_found_inf(found_inf, left.device)
        return cut

    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _COMBINES.checked(check, None, (a, b), (found_inf,), out, dots)
    bounds = _bounds(known, segments, a)
    if dots.shape[0] != len(bounds) - 1:
        check_dots(dots, len(bounds) - 1, a)
    target = new_like(a) if out is None else out
    if traced:
        call("combine", a, b, dots, bounds, target, found_inf)
    else:
        place = place or place_of((a, b), known, out, found_inf, _A_OR_B)
        _combine(a, b, dots, bounds, target, found_inf, place)
    return target


def adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Adasum of two tensors, a segment at a time: `combine` of their `dot_and_norms`.

    Arguments and errors as there. NaN or Inf in a segment reaches that segment alone.
    """

    def check() -> _Cut:
        left = check_pair(a, b, out)
        check_found_inf(found_inf, left.device)
        return _cut(segments, left)

    traced = tracing()
    if traced:
        known, place = Known(check()), None
    else:
        known, place = _ADASUMS.checked(check, None, (a, b), (found_inf,), out)
    bounds = _bounds(known, segments, a)
    target = new_like(a) if out is None else out
    if traced:
        call("adasum", a, b, bounds, target, found_inf)
    else:
        place = place or place_of((a, b), known, out, found_inf, _A_OR_B)
        _adasum(a, b, bounds, target, found_inf, place)
    return target


def dot_and_norms_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Least traffic of `dot_and_norms`, in bytes: a and b read, 24 bytes a segment written.

    Tensors may lie on any device, here and in the other functions that count bytes.
    """
    left, right = check_sized("a", a), check_sized("b", b)
    count = len(check_segments(segments, left.numel())) - 1
    return left.numel() * left.element_size() + right.numel() * right.element_size() + 24 * count


def combine_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Least traffic of `combine`, in bytes: a, b and the dots read, one tensor written."""
    return dot_and_norms_bytes(a, b, segments) + a.numel() * a.element_size()


def adasum_bytes(a: Tensor, b: Tensor) -> int:
    """Least traffic of `adasum`, in bytes: a and b read once, one tensor written."""
    left, right = check_sized("a", a), check_sized("b", b)
    return 2 * left.numel() * left.element_size() + right.numel() * right.element_size()


def dot_and_norms_reference(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """`dot_and_norms` in plain float64 torch; arguments and errors as there."""
    left = check_tensor("a", a)
    right = check_like("b", b, "a", left)
    bounds = check_segments(segments, left.numel())
    x, y = left.detach().double().view(-1), right.detach().double().view(-1)
    rows = [
        torch.stack([(u * v).sum(), (u * u).sum(), (v * v).sum()])
        for u, v in ((x[low:high], y[low:high]) for low, high in itertools.pairwise(bounds))
    ]
    return torch.stack(rows) if rows else x.new_zeros(0, 3)


def combine_reference(
    a: Tensor, b: Tensor, dots: Tensor, segments: Sequence[int] | None = None
) -> Tensor:
    """`combine` evaluated in float64 and left there."""
    left = check_tensor("a", a)
    right = check_like("b", b, "a", left)
    bounds = check_segments(segments, left.numel())
    dots = check_dots(dots, len(bounds) - 1, left)
    x, y = left.detach().double().view(-1), right.detach().double().view(-1)
    result = torch.empty_like(x)
    for (ca, cb), low, high in zip(
        coefficients(dots).tolist(), bounds[:-1], bounds[1:], strict=True
    ):
        result[low:high] = ca * x[low:high] + cb * y[low:high]
    return result.view(left.shape)


def adasum_reference(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """`adasum` evaluated in float64 and left there."""
    return combine_reference(a, b, dot_and_norms_reference(a, b, segments), segments)
