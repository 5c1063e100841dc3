"""dot_and_norms, combine and adasum: the pairwise projection of Adasum, for each segment.

With d = a.b, A = |a|^2 and B = |b|^2 over one segment,
adasum(a, b) = (1 - d/(2A)) a + (1 - d/(2B)) b  (arXiv 2006.02924, section 3): parallel vectors
average, orthogonal ones sum.

If a is the result for p ranks and b the result for q ranks, the formula with weights p and q is
(1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b. For orthogonal vectors, d = 0, that is the sum again. For
parallel ones, a = s x and b = t x, it is (s + t - p/(p+q) t - q/(p+q) s) x = (p a + q b)/(p + q):
if a and b are the means of p and of q vectors, it is the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.arguments import check, check_table
from kernels.binding import run_direct
from kernels.cpu.torch_fallback import blend_of, dots_of
from kernels.plans import Plan, ProjectionPlan
from kernels.torch_ops import check_and_run
from kernels.validation import (
    EQUAL,
    check_like,
    check_segments,
    check_sized,
    check_tensor,
    check_weights,
)

Weights = tuple[float, float]


def dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """Return float64 [S, 3] on the tensors' device: `(a.b, |a|^2, |b|^2)` per segment.

    Squares of float16, bfloat16 and float32 values neither under- nor overflow. Errors are those of
    `pack`.

    Args:
        a: A tensor of any shape, which is treated as flat.
        b: Equal to a in shape, dtype and device.
        segments: Element boundaries (0, ..., numel); None for one segment. The row of an empty
            segment is zeros.

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        >>> kernels.dot_and_norms(a, b)
        tensor([[11.,  5., 25.]], dtype=torch.float64)
        >>> kernels.dot_and_norms(a, b, segments=[0, 1, 2])
        tensor([[ 3.,  1.,  9.],
                [ 8.,  4., 16.]], dtype=torch.float64)
    """
    given = (a, b), None, None, 1.0, 1.0, segments
    dots = run_direct("dot_and_norms", given)
    return check_and_run("dot_and_norms", *given) if dots is None else dots


def plan_dot_and_norms(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Plan[Tensor]:
    """Plan `dot_and_norms` of a and b: run it as plan().

    Examples:
        >>> plan = kernels.plan_dot_and_norms(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        >>> plan()
        tensor([[11.,  5., 25.]], dtype=torch.float64)
    """
    return Plan(check("dot_and_norms", (a, b), None, None, segments))


def combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Return (1 - d/(2A)) a + (1 - d/(2B)) b per segment; (d, A, B) is its row of `dots`.

    With `weights` (p, q) it is (1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b, with the same bits if
    p = q. A coefficient is 1 if its squared norm (A or B) is below sqrt(DBL_MIN), and NaN if that,
    times 2 or (p+q)/p, is beyond DBL_MAX. The result is rounded once to the dtype; if a and b
    nearly cancel they are blended in float64. For float64 vectors that nearly cancel, the rounding
    of the dots remains: with dots from `dot_and_norms`, the error of the result
    `v = alpha a + beta b` is at most `100 eps (|alpha a| + |beta b|)` in L2 norm. Relative to `|v|`
    that is `100 eps sqrt(R)` with `R = (|alpha a| + |beta b|)^2 / |v|^2`. Errors are those of
    `pack`.

    Args:
        a: As in `dot_and_norms`.
        b: As in `dot_and_norms`.
        dots: float64 [S, 3], from `dot_and_norms`, or the sum of its results over the ranks that
            hold parts of the segments.
        segments: As in `dot_and_norms`.
        weights: How many vectors a and b are the results of: positive and finite.
        out: The tensor to write and return, which may be a or b. None makes one.
        found_inf: As in `pack`.

    Examples:
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
        >>> kernels.combine(a, b, kernels.dot_and_norms(a, b))  # a / 2 + 3 b / 4
        tensor([1.2500, 0.7500])
    """
    given = (a, b), out, None, *check_weights(weights), segments, found_inf, dots
    found = run_direct("combine", given)
    return check_and_run("combine", *given) if found is None else found


def plan_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> ProjectionPlan:
    """Plan `combine` of a and b: run it as plan(weights), which reads the values of `dots` then.

    Examples:
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
        >>> plan = kernels.plan_combine(a, b, kernels.dot_and_norms(a, b))
        >>> plan()
        tensor([1.2500, 0.7500])
    """
    return ProjectionPlan(check("combine", (a, b), out, None, segments, found_inf, dots))


def adasum(
    a: Tensor,
    b: Tensor | None = None,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    cooperative: bool = True,
) -> Tensor:
    """Return the Adasum of two tensors per segment: `combine` of their `dot_and_norms`.

    With `d = a.b`, `A = |a|^2` and `B = |b|^2` of the segment it is
    `(1 - d/(2A)) a + (1 - d/(2B)) b`, and with `weights` (p, q)
    `(1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b`. Parallel vectors average, orthogonal ones sum.
    Arguments and errors are the same as of `combine`. NaN and Inf affect only their own segment.

    `cooperative` says whether a GPU may use one cooperative launch if the tensors fit on chip. They
    are then read once, but all programs of the launch must be resident at the same time, with up to
    all registers of the GPU, and they wait for each other. If kernels that wait (such as NCCL's)
    run concurrently, pass False for two launches, which do not wait. The bits are the same, and on
    a CPU it makes no difference.

    Examples:
        >>> kernels.adasum(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))  # orthogonal
        tensor([3., 4.])
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])  # parallel
        >>> kernels.adasum(a, b)
        tensor([2., 4.])
        >>> kernels.adasum(a, b, weights=(3, 1))
        tensor([1.5000, 3.0000])
    """
    if b is None:
        raise TypeError(
            "adasum takes two tensors, a and b: for a list of any number use gram, "
            "adasum_coefficients and weighted_sum"
        )
    factors = check_weights(weights)
    given = (a, b), out, None, *factors, segments, found_inf, None, cooperative
    found = run_direct("adasum", given)
    return check_and_run("adasum", *given) if found is None else found


def plan_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    cooperative: bool = True,
) -> ProjectionPlan:
    """Plan `adasum` of a and b: run it as plan(weights).

    Examples:
        >>> plan = kernels.plan_adasum(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]))
        >>> plan(weights=(3, 1))
        tensor([1.5000, 3.0000])
    """
    others = found_inf, None, cooperative
    return ProjectionPlan(check("adasum", (a, b), out, None, segments, *others))


def dot_and_norms_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Return the least traffic of `dot_and_norms` in bytes: a and b read, 24 per segment written.

    Tensors may be on any device, here and in the other functions that count bytes.

    Examples:
        >>> kernels.dot_and_norms_bytes(torch.ones(2), torch.ones(2))  # 16 read, 24 written
        40
    """
    left, right = check_sized("a", a), check_sized("b", b)
    count = len(check_segments(segments, left.numel())) - 1
    return left.nbytes + right.nbytes + 24 * count


def combine_bytes(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> int:
    """Return the least traffic of `combine` in bytes: a, b and dots read, one tensor written.

    Examples:
        >>> kernels.combine_bytes(torch.ones(2), torch.ones(2))  # 16 and 24 read, 8 written
        48
    """
    return dot_and_norms_bytes(a, b, segments) + a.nbytes


def adasum_bytes(a: Tensor, b: Tensor) -> int:
    """Return the least traffic of `adasum` in bytes: a and b read once, one tensor written.

    Examples:
        >>> kernels.adasum_bytes(torch.ones(2), torch.ones(2))  # 16 read, 8 written
        24
    """
    left, right = check_sized("a", a), check_sized("b", b)
    return 2 * left.nbytes + right.nbytes


def dot_and_norms_reference(a: Tensor, b: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """Return `dot_and_norms` by plain torch in float64.

    Examples:
        >>> kernels.dot_and_norms_reference(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([[11.,  5., 25.]], dtype=torch.float64)
    """
    bounds = _check_pair(a, b, segments)
    return dots_of(a.detach(), b.detach(), bounds)


def combine_reference(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
) -> Tensor:
    """Return `combine`, computed and returned in float64.

    Examples:
        >>> a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
        >>> kernels.combine_reference(a, b, kernels.dot_and_norms_reference(a, b))
        tensor([1.2500, 0.7500], dtype=torch.float64)
    """
    bounds = _check_pair(a, b, segments)
    dots = check_table("dots", dots, (len(bounds) - 1, 3), a.device)
    factors = check_weights(weights)
    return blend_of(a.detach(), b.detach(), dots.detach(), bounds, *factors).view(a.shape)


def adasum_reference(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    weights: Weights = EQUAL,
) -> Tensor:
    """Return `adasum`, computed and returned in float64.

    Examples:
        >>> kernels.adasum_reference(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]))
        tensor([2., 4.], dtype=torch.float64)
    """
    dots = dot_and_norms_reference(a, b, segments)
    return combine_reference(a, b, dots, segments, weights=weights)


def _check_pair(a: Tensor, b: Tensor, segments: Sequence[int] | None) -> tuple[int, ...]:
    """Check that `b` is like `a`; return the boundaries of their segments."""
    check_like("b", b, "a", check_tensor("a", a))
    return check_segments(segments, a.numel())
