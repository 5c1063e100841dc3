"""dot_and_norms, combine and adasum: the pairwise projection of Adasum, a segment at a time.

With d = a.b, A = |a|^2 and B = |b|^2 over one segment,
adasum(a, b) = (1 - d/(2A)) a + (1 - d/(2B)) b  (arXiv 2006.02924, section 3): parallel vectors
average, orthogonal ones sum.

Where a is what p ranks' vectors make and b what q ranks' make, they are weighed by p and q:
(1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b. Of orthogonal ones, d = 0, that is the sum again. Of
parallel ones, a = s x and b = t x, it is (s + t - p/(p+q) t - q/(p+q) s) x = (p a + q b)/(p + q):
of the means of p and of q vectors the mean of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arguments import (
    check_adasum,
    check_combine,
    check_dot_and_norms,
    check_dots,
    check_segments,
)
from kernels.arithmetic import TINY
from kernels.findings import Findings
from kernels.plans import AdasumPlan, CombinePlan, DotAndNormsPlan
from kernels.torch_ops import run
from kernels.validation import EQUAL, check_like, check_sized, check_tensor, check_weights

Weights = tuple[float, float]


def dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """Return float64 [S, 3] on the tensors' device, a row `(a.b, |a|^2, |b|^2)` per segment.

    No square under- or overflows for float16, bfloat16 or float32 values.

    Args:
        a: Taken as flat.
        b: Equal to a in shape, dtype and device.
        segments: Element boundaries (0, ..., numel), None for one segment; an empty segment gives
            zeros.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: One cannot be used.
    """
    dots: Tensor = run(check_dot_and_norms(a, b, segments))
    return dots


def plan_dot_and_norms(
    a: Tensor, b: Tensor, segments: Sequence[int] | None = None
) -> DotAndNormsPlan:
    """Plan `dot_and_norms` of a and b: run it as plan().

    Arguments and errors as there, and of every plan: see `Plan`. A run returns the same tensor
    each time.
    """
    return DotAndNormsPlan(check_dot_and_norms(a, b, segments))


def combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> Tensor:
    """Return (1 - d/(2A)) a + (1 - d/(2B)) b a segment, with (d, A, B) the rows of `dots`.

    With `weights` (p, q) it is (1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b, the same bits where
    p = q. A coefficient whose squared norm is below sqrt(DBL_MIN) is 1; one whose squared norm,
    times 2 or (p+q)/p, is beyond DBL_MAX is NaN. Rounded once to the dtype; where the two nearly
    cancel they are blended with float64's precision. Of float64 vectors that nearly cancel the
    dots' own rounding is left: with them from `dot_and_norms` the result
    `v = alpha a + beta b` is off by `100 eps (|alpha a| + |beta b|)` at most in L2 norm, which
    beside `|v|` is `100 eps sqrt(R)` with `R = (|alpha a| + |beta b|)^2 / |v|^2`.

    Args:
        a: Taken as flat.
        b: Equal to a in shape, dtype and device.
        dots: float64 [S, 3], as `dot_and_norms` returns or summed over the ranks that hold the
            segments' parts.
        segments: As in `dot_and_norms`.
        weights: How many vectors stand behind a, and how many behind b: positive and finite.
        out: Written and returned; may be a or b. None makes one.
        found_inf: float32 of one element, set to 1 where an output is not finite, else left.
        max_abs: One element, float64 where the output is, else float32; set to the largest
            magnitude written, NaN if any is.

    Raises:
        TypeError: An argument has another type or dtype. Nothing has been written.
        ValueError: One cannot be used, or overlaps what is written. Nothing has been written.
    """
    factors = check_weights(weights)
    call = check_combine(a, b, dots, segments, out, Findings(found_inf, max_abs))
    combined: Tensor = run(call, *factors)
    return combined


def plan_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> CombinePlan:
    """Plan `combine` of a and b: run it as plan(weights), with what `dots` then holds.

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    return CombinePlan(check_combine(a, b, dots, segments, out, Findings(found_inf, max_abs)))


def adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
    cooperative: bool = True,
) -> Tensor:
    """Return the Adasum of two tensors, a segment at a time: `combine` of their `dot_and_norms`.

    Arguments and errors are those of `combine`. NaN or Inf in a segment reaches that segment alone.

    `cooperative` says whether a GPU may do it in one cooperative launch where the tensors fit on
    chip. They are then read once, but all programs of the launch must be resident at once, on up to
    every register of the GPU, and wait for each other. Beside kernels that wait in turn, as NCCL's
    do for other ranks, take two launches, which wait for nothing. The bits are the same; on a CPU
    it makes no difference.
    """
    factors = check_weights(weights)
    call = check_adasum(a, b, segments, out, Findings(found_inf, max_abs), cooperative)
    combined: Tensor = run(call, *factors)
    return combined


def plan_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
    cooperative: bool = True,
) -> AdasumPlan:
    """Plan `adasum` of a and b: run it as plan(weights).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    return AdasumPlan(check_adasum(a, b, segments, out, Findings(found_inf, max_abs), cooperative))


def dot_and_norms_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Least traffic of `dot_and_norms`, in bytes: a and b read, 24 bytes a segment written.

    Tensors may lie on any device, here and in the other functions that count bytes.
    """
    left, right = check_sized("a", a), check_sized("b", b)
    count = len(check_segments(segments, left.numel())) - 1
    return left.nbytes + right.nbytes + 24 * count


def combine_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Least traffic of `combine`, in bytes: a, b and the dots read, one tensor written."""
    return dot_and_norms_bytes(a, b, segments) + a.nbytes


def adasum_bytes(a: Tensor, b: Tensor) -> int:
    """Least traffic of `adasum`, in bytes: a and b read once, one tensor written."""
    left, right = check_sized("a", a), check_sized("b", b)
    return 2 * left.nbytes + right.nbytes


def dot_and_norms_reference(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """`dot_and_norms` in plain float64 torch; arguments and errors as there."""
    x, y, bounds = _flat(a, b, segments)
    rows = [
        torch.stack([(u * v).sum(), (u * u).sum(), (v * v).sum()])
        for u, v in ((x[low:high], y[low:high]) for low, high in itertools.pairwise(bounds))
    ]
    return torch.stack(rows) if rows else x.new_zeros(0, 3)


def combine_reference(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
) -> Tensor:
    """`combine` evaluated in float64 and left there."""
    x, y, bounds = _flat(a, b, segments)
    dots = check_dots(dots, len(bounds) - 1, x)
    result = torch.empty_like(x)
    coefficients = _coefficients(dots, weights).tolist()
    for (ca, cb), low, high in zip(coefficients, bounds[:-1], bounds[1:], strict=True):
        result[low:high] = ca * x[low:high] + cb * y[low:high]
    return result.view(a.shape)


def adasum_reference(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
) -> Tensor:
    """`adasum` evaluated in float64 and left there."""
    dots = dot_and_norms_reference(a, b, segments)
    return combine_reference(a, b, dots, segments, weights=weights)


def _flat(
    a: Tensor, b: Tensor, segments: Sequence[int] | None
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Both in float64 and flat, and the segments' boundaries."""
    left = check_tensor("a", a)
    right = check_like("b", b, "a", left)
    bounds = check_segments(segments, left.numel())
    return left.detach().double().view(-1), right.detach().double().view(-1), bounds


def _coefficients(dots: Tensor, weights: Weights) -> Tensor:
    """float64 [S, 2] rows (1 - d/(fA), 1 - d/(gB)) of the rows (d, A, B) of `dots`.

    f = (p + q)/p and g = (p + q)/q of the weights (p, q). A coefficient whose squared norm is below
    sqrt(DBL_MIN) is 1; a NaN norm is not, so NaN stays. One whose fA is beyond DBL_MAX is NaN.
    """
    norms, factors = dots[:, 1:], dots.new_tensor(check_weights(weights))
    scaled = factors * norms
    scaled = scaled.masked_fill((scaled == math.inf) & (factors < math.inf), math.nan)
    return torch.where(norms < TINY, 1.0, 1.0 - dots[:, :1] / scaled)
