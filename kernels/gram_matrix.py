"""gram, adasum_coefficients and weighted_sum: Adasum of n vectors by one Gram matrix.

Every vector in a tree of pairwise Adasum is a sum of the vectors at its leaves, v = sum c_i g_i,
and every dot product that the tree needs is c^T G c' with the leaves' Gram matrix, G[i, j] =
g_i.g_j. So one pass over the vectors gives all coefficients of any tree, and a second pass the
result::

    matrices = kernels.gram(vectors, segments)                            # [S, n, n]
    tree = [(0, 1, 1, 1), (2, 3, 1, 1), (0, 2, 2, 2)]                     # of four
    coefficients = kernels.adasum_coefficients(matrices[None], tree)      # [S, n]
    result = kernels.weighted_sum(vectors, coefficients, segments)

The rounding errors of G affect |v|^2, multiplied by the spread, (sum |c_i| |g_i|)^2 / |v|^2, which
is large if vectors cancel. With `precise=True`, G is double-double if vectors may cancel beyond
`SPREAD_LIMIT`, so that the result stays accurate however far they cancel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kernels.arguments import (
    check,
    check_adasum_coefficients,
    check_all_sized,
    check_equals,
    check_partials,
    check_table,
)
from kernels.binding import run_direct
from kernels.call import check_tree
from kernels.cpu.torch_fallback import tree_of, weighed
from kernels.plans import Plan
from kernels.torch_ops import check_and_run, run
from kernels.validation import (
    check_flag,
    check_segments,
    check_sized,
    check_tensor,
)

Rows = Sequence[tuple[int, int, float, float]]


def gram(
    tensors: Iterable[Tensor],
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    precise: bool = False,
) -> Tensor:
    """Return float64 [S, n, n], symmetric: per segment the dot products of all pairs of n tensors.

    Products of float16, bfloat16 and float32 are exact and sums are in float64, so that no square
    under- or overflows. NaN and Inf affect only their segment. Errors are those of `pack`.

    Args:
        tensors: At least one, equal in shape, dtype and device, treated as flat.
        segments: Element boundaries (0, ..., numel), None for one segment; an empty segment gives
            zeros.
        out: The tensor to write and return. None makes one.
        precise: Return [S, n, n, 2] instead, each entry an unevaluated sum high + low. If float64
            sums show that some v = sum c_i g_i of a segment may have a spread above `SPREAD_LIMIT`,
            the entries are computed again with about 104 bits, which is slow. Otherwise all low
            parts are 0. So v . v has enough bits, both by this matrix and by its sum with matrices
            of other parts of the same vectors.

    Examples:
        >>> kernels.gram([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        tensor([[[1., 1.],
                 [1., 2.]]], dtype=torch.float64)
    """
    kind = check_flag("precise", precise)
    given = tensors, out, None, 1.0, 1.0, segments, None, None, kind
    found = run_direct("gram", given)
    return check_and_run("gram", *given) if found is None else found


def plan_gram(
    tensors: Iterable[Tensor],
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    precise: bool = False,
) -> Plan[Tensor]:
    """Plan `gram` of these tensors: run it as plan().

    Examples:
        >>> plan = kernels.plan_gram([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        >>> plan()
        tensor([[[1., 1.],
                 [1., 2.]]], dtype=torch.float64)
    """
    kind = check_flag("precise", precise)
    return Plan(check("gram", tensors, out, None, segments, kind=kind))


def adasum_coefficients(
    partials: Tensor, tree: Rows, *, out: Tensor | None = None, spread: Tensor | None = None
) -> Tensor:
    """Return float64 [S, n], the factors with which the n vectors add up to the tree's Adasum.

    Each pair is weighed as by `combine`: v = (1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b. Everything
    is computed in double-double. A vector counts as zero, with a factor of 1, if its squared norm
    is below sqrt(DBL_MIN) or below `2**-46 (sum |c_i| |g_i|)^2`, with precise partials `2**-92`
    times that. With precise partials, a zero result has coefficients of 0, since rounded ones would
    give it a direction. A segment with a NaN or Inf in its matrix has NaN coefficients. Errors are
    those of `pack`.

    Args:
        partials: float64 [R, S, n, n], R results of `gram` to add in order, or [R, S, n, n, 2] of
            precise ones.
        tree: n - 1 rows (left, right, p, q) that join all vectors. Each replaces the vector at
            `left` by the Adasum of the vectors at `left` and `right`, with these weights. The last
            row's `left` is the place of the result.
        out: The tensor to write and return. None makes one.
        spread: float64 [S], an output: the largest spread, `(sum |c_i| |g_i|)^2 / |v|^2`, of the
            tree's vectors v = sum c_i g_i. It is 1 if all g_i are zero, and inf if only v is. If it
            is above `SPREAD_LIMIT`, partials should be precise.

    Examples:
        >>> matrices = kernels.gram([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        >>> kernels.adasum_coefficients(matrices[None], [(0, 1, 1, 1)])
        tensor([[0.5000, 0.7500]], dtype=torch.float64)
    """
    coefficients: Tensor = run(check_adasum_coefficients(partials, tree, out, spread))
    return coefficients


def plan_adasum_coefficients(
    partials: Tensor, tree: Rows, *, out: Tensor | None = None, spread: Tensor | None = None
) -> Plan[Tensor]:
    """Plan `adasum_coefficients` of these partials: run it as plan(), which reads their new values.

    Examples:
        >>> matrices = kernels.gram([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        >>> plan = kernels.plan_adasum_coefficients(matrices[None], [(0, 1, 1, 1)])
        >>> plan()
        tensor([[0.5000, 0.7500]], dtype=torch.float64)
    """
    return Plan(check_adasum_coefficients(partials, tree, out, spread))


def weighted_sum(
    tensors: Iterable[Tensor],
    coefficients: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Return per segment s: coefficients[s, 0] * tensors[0] + coefficients[s, 1] * tensors[1] + ...

    It is added in float64 in list order, with products fused into sums, and rounded to the dtype,
    to 16 bits through float32, as torch does. A coefficient of 0 multiplies like any other: 0 times
    NaN is NaN. Errors are those of `pack`.

    Args:
        tensors: At least one, equal in shape, dtype and device, treated as flat.
        coefficients: float64 [S, n].
        segments: As in `gram`.
        out: The tensor to write and return, which may be one of the tensors. None makes one.
        found_inf: As in `pack`.

    Examples:
        >>> coefficients = torch.tensor([[0.5, 0.75]], dtype=torch.float64)
        >>> kernels.weighted_sum([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])], coefficients)
        tensor([1.2500, 0.7500])
    """
    given = tensors, out, None, 1.0, 1.0, segments, found_inf, coefficients
    total = run_direct("weighted_sum", given)
    return check_and_run("weighted_sum", *given) if total is None else total


def plan_weighted_sum(
    tensors: Iterable[Tensor],
    coefficients: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Plan[Tensor]:
    """Plan `weighted_sum` of these tensors: run it as plan(), which reads `coefficients` each time.

    Examples:
        >>> coefficients = torch.tensor([[0.5, 0.75]], dtype=torch.float64)
        >>> plan = kernels.plan_weighted_sum([torch.ones(2), torch.ones(2)], coefficients)
        >>> plan()
        tensor([1.2500, 1.2500])
    """
    return Plan(check("weighted_sum", tensors, out, None, segments, found_inf, coefficients))


def gram_bytes(
    tensors: Iterable[Tensor], segments: Sequence[int] | None = None, *, precise: bool = False
) -> int:
    """Return the least traffic of `gram` in bytes: all tensors read once, matrices written.

    Examples:
        >>> kernels.gram_bytes([torch.ones(2), torch.ones(2)])  # 16 read, 4 entries of 8 written
        48
    """
    sized = check_all_sized(tensors)
    count = len(check_segments(segments, sized[0].numel())) - 1
    entries = count * len(sized) ** 2 * (2 if check_flag("precise", precise) else 1)
    return sum(tensor.nbytes for tensor in sized) + 8 * entries


def adasum_coefficients_bytes(partials: Tensor) -> int:
    """Return the least traffic of `adasum_coefficients` in bytes: partials read, out written.

    Examples:
        >>> kernels.adasum_coefficients_bytes(torch.ones(1, 1, 2, 2, dtype=torch.float64))
        48
    """
    given = check_partials(check_sized("partials", partials))
    return given.nbytes + 8 * given.shape[1] * given.shape[2]


def weighted_sum_bytes(tensors: Iterable[Tensor], segments: Sequence[int] | None = None) -> int:
    """Return the least traffic of `weighted_sum` in bytes: tensors, coefficients and out once.

    Examples:
        >>> kernels.weighted_sum_bytes([torch.ones(2), torch.ones(2)])  # 16 and 16 read, 8 written
        40
    """
    sized = check_all_sized(tensors)
    count = len(check_segments(segments, sized[0].numel())) - 1
    return sum(tensor.nbytes for tensor in sized) + 8 * count * len(sized) + sized[0].nbytes


def gram_reference(tensors: Iterable[Tensor], segments: Sequence[int] | None = None) -> Tensor:
    """Return `gram` by plain torch in float64.

    Examples:
        >>> kernels.gram_reference([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        tensor([[[1., 1.],
                 [1., 2.]]], dtype=torch.float64)
    """
    given = check_equals(tensors)
    bounds = check_segments(segments, given[0].numel())
    rows = torch.stack([one.detach().double().view(-1) for one in given])
    parts = [rows[:, low:high] for low, high in itertools.pairwise(bounds)]
    found = [(part[:, None] * part[None]).sum(2) for part in parts]
    return torch.stack(found) if found else rows.new_zeros(0, len(rows), len(rows))


def adasum_coefficients_reference(partials: Tensor, tree: Rows) -> Tensor:
    """Return `adasum_coefficients`, computed with 60 digits and rounded once.

    Examples:
        >>> matrices = kernels.gram_reference([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])])
        >>> kernels.adasum_coefficients_reference(matrices[None], [(0, 1, 1, 1)])
        tensor([[0.5000, 0.7500]], dtype=torch.float64)
    """
    checked = check_partials(check_tensor("partials", partials)).detach()
    return tree_of(checked, check_tree(tree, checked.shape[2]))[0]


def weighted_sum_reference(
    tensors: Iterable[Tensor], coefficients: Tensor, segments: Sequence[int] | None = None
) -> Tensor:
    """Return `weighted_sum`, computed and returned in float64.

    Examples:
        >>> coefficients = torch.tensor([[0.5, 0.75]], dtype=torch.float64)
        >>> kernels.weighted_sum_reference([torch.ones(2), torch.ones(2)], coefficients)
        tensor([1.2500, 1.2500], dtype=torch.float64)
    """
    given = check_equals(tensors)
    bounds = check_segments(segments, given[0].numel())
    shape = (len(bounds) - 1, len(given))
    factors = check_table("coefficients", coefficients, shape, given[0].device)
    return weighed(given, factors, bounds).view(given[0].shape)
