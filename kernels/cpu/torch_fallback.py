"""The CPU path without compiled code: torch's functions in float64, slow but accurate.

Only copies and sums are computed in the dtypes of kernels/cpu/native.c, because their bits are
specified. The other functions are also the public references.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Context, Decimal, localcontext

import torch
from torch import Tensor

from kernels.arithmetic import SPREAD_LIMIT, TINY, compute_dtype, joined
from kernels.call import Call, Tree

# Decimal digits: enough for products of double-double numbers.
_DIGITS = 60


def _write(call: Call, result: Tensor) -> None:
    call.out.copy_(result.view(call.out.shape))
    _report(call, (call.out,))


def _report(call: Call, written: Sequence[Tensor]) -> None:
    """Set the call's flag if tensors that were just written hold Inf or NaN."""
    if call.found_inf is not None and not all(bool(one.isfinite().all()) for one in written):
        call.found_inf.fill_(1.0)


def copy(call: Call, scale: float | Tensor) -> None:
    """Copy between tensors and their slots of the buffer; packing zeroes the padding."""
    assert call.layout is not None
    if call.packing:
        call.out.zero_()
    for tensor, slot in zip(call.inputs, call.layout.views(call.out), strict=True):
        target, source = (slot, tensor) if call.packing else (tensor, slot)
        target.copy_(source.to(compute_dtype(source.dtype, target.dtype)) * scale)
    _report(call, (call.out,) if call.packing else call.inputs)


pack = unpack = copy


def sum_n(call: Call, scale: float) -> None:
    """Write out = scale * (t0 + t1 + ...), in the call's order."""
    inputs, wide = call.inputs, compute_dtype(call.inputs[0].dtype, call.out.dtype)
    total = joined(str(call.kind), len(inputs), lambda i: inputs[i].to(call.accumulated), torch.add)
    _write(call, total.to(wide) * scale)


def scaled_add(call: Call, alpha: float, beta: float) -> None:
    """Write out = alpha*a + beta*b."""
    a, b = call.inputs
    _write(call, a.double() * alpha + b.double() * beta)


def dots_of(a: Tensor, b: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return a row (a.b, |a|^2, |b|^2) for each segment."""
    x, y = a.double().view(-1), b.double().view(-1)
    dots = x.new_zeros(len(bounds) - 1, 3)
    for row, (low, high) in zip(dots, itertools.pairwise(bounds), strict=True):
        u, v = x[low:high], y[low:high]
        # Not torch.dot, which adds from left to right, with errors up to 400 eps for 2^20 elements.
        row.copy_(torch.stack([(u * v).sum(), (u * u).sum(), (v * v).sum()]))
    return dots


def dot_and_norms(call: Call) -> None:
    """Write `dots_of` the tensors into `out`."""
    a, b = call.inputs
    call.out.copy_(dots_of(a, b, call.bounds))


def blend_of(a: Tensor, b: Tensor, dots: Tensor, bounds: Sequence[int], *factors: float) -> Tensor:
    """Return (1 - d/(fA)) a + (1 - d/(gB)) b per segment, flat; (d, A, B) are rows of `dots`.

    f and g are the factors of a's and b's squared norm, as `check_weights` returns them. A
    coefficient is 1 if its squared norm is below sqrt(DBL_MIN), but NaN if the norm is NaN, or if
    fA exceeds DBL_MAX although f is finite.
    """
    norms, by = dots[:, 1:], dots.new_tensor(factors)
    scaled = by * norms
    scaled = scaled.masked_fill((scaled == math.inf) & (by < math.inf), math.nan)
    coefficients = torch.where(norms < TINY, 1.0, 1.0 - dots[:, :1] / scaled).tolist()
    x, y = a.double().view(-1), b.double().view(-1)
    result = torch.empty_like(x)
    for (alpha, beta), low, high in zip(coefficients, bounds[:-1], bounds[1:], strict=True):
        u, v = x[low:high], y[low:high]
        # Opposed tensors of one length: their sum is exact if they nearly cancel.
        opposed = alpha == beta > 1
        result[low:high] = (u + v) * alpha if opposed else u * alpha + v * beta
    return result


def combine(call: Call, factor_a: float, factor_b: float) -> None:
    """Write `blend_of` the tensors and the call's dots."""
    assert call.table is not None
    a, b = call.inputs
    _write(call, blend_of(a, b, call.table, call.bounds, factor_a, factor_b))


def adasum(call: Call, factor_a: float, factor_b: float) -> None:
    """`combine` of the tensors' `dot_and_norms`."""
    a, b = call.inputs
    combine(replace(call, table=dots_of(a, b, call.bounds)), factor_a, factor_b)


def gram(call: Call) -> None:
    """Write into `out` the matrix of dot products of each segment."""
    vectors = [one.double().view(-1) for one in call.inputs]
    pairs = [*itertools.combinations_with_replacement(range(len(vectors)), 2)]
    call.out.zero_()
    for matrix, low, high in zip(call.out, call.bounds[:-1], call.bounds[1:], strict=True):
        parts, sums = [one[low:high] for one in vectors], matrix[..., 0] if call.precise else matrix
        for i, j in pairs:
            # Not torch.dot, whose bits depend on the tensors' alignment.
            sums[i, j] = sums[j, i] = (parts[i] * parts[j]).sum()
        if call.precise and _may_cancel(sums):
            for i, j in pairs:
                matrix[i, j] = matrix[j, i] = _exact_dot(parts[i], parts[j])


def _may_cancel(matrix: Tensor) -> bool:
    """Return whether vectors may cancel beyond SPREAD_LIMIT: kernels/cpu/replay.h says how."""
    diagonal = matrix.diagonal()
    lowered = torch.where(diagonal == 0, 1.0, diagonal * (1 - len(matrix) / SPREAD_LIMIT))
    factor = torch.linalg.cholesky_ex(matrix - torch.diag(diagonal - lowered))
    return bool(diagonal.isfinite().all()) and factor.info.item() > 0


def _exact_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return a dot product, rounded once, as a sum (high, low) (Veltkamp, Shewchuk)."""
    product, scaled = x * y, [one * (2.0**27 + 1.0) for one in (x, y)]
    (a, c) = (by - (by - one) for by, one in zip(scaled, (x, y), strict=True))
    b, d = x - a, y - c
    terms = [*product.tolist(), *(((a * c - product) + a * d + b * c) + b * d).tolist()]
    high = math.fsum(terms)
    return x.new_tensor([high, math.fsum([*terms, -high])])


def tree_of(partials: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the coefficients [S, n] of a tree, and the spread [S], computed with 60 digits."""
    found = [_replay(partials[:, i], tree) for i in range(partials.shape[1])]
    coefficients = partials.new_tensor([row for row, _ in found]).view(-1, partials.shape[2])
    return coefficients, partials.new_tensor([spread for _, spread in found])


def _replay(tables: Tensor, tree: Tree) -> tuple[list[float], float]:
    """Return one segment's coefficients and spread, by the rules of kernels/cpu/replay.h."""
    size, precise, widest = tables.shape[1], tables.dim() == 4, Decimal(1)
    rounded, nothing = Decimal(2.0 ** (-92 if precise else -46)), False
    lost = [math.nan] * size, math.nan
    if not bool(tables.isfinite().all()) or not bool(tables.sum(0).isfinite().all()):
        return lost
    with localcontext(Context(prec=_DIGITS)):
        # Add the entries of all tables, with both of their parts, exactly.
        entries = tables.movedim(0, 2).reshape(size, size, -1).tolist()
        matrix = [[sum(map(Decimal, entry), Decimal(0)) for entry in row] for row in entries]
        lengths = [max(matrix[i][i], Decimal(0)).sqrt() for i in range(size)]
        # Each vector as coefficients of leaves; every leaf belongs to one vector.
        vectors = [{i: Decimal(1)} for i in range(size)]
        last = 0

        def dot(v: dict[int, Decimal], w: dict[int, Decimal]) -> Decimal:
            pairs = itertools.product(v.items(), w.items())
            return sum((x * matrix[i][j] * y for (i, x), (j, y) in pairs), Decimal(0))

        def reach(v: dict[int, Decimal]) -> Decimal:
            return sum((abs(x) * lengths[i] for i, x in v.items()), Decimal(0)) ** 2

        for left, right, *weights in tree:
            pair, last = (vectors[left], vectors[right]), left
            norms, reaches, product = [dot(v, v) for v in pair], [*map(reach, pair)], dot(*pair)
            shares = [Decimal(weight) / sum(map(Decimal, weights)) for weight in weights]
            both = [*zip(norms, reaches, strict=True)]
            zeros = [norm < Decimal(TINY) or norm < rounded * most for norm, most in both]
            apart = Decimal(2.0**-100) * (reaches[0] * norms[1] + reaches[1] * norms[0])
            parallel = precise and abs(norms[0] * norms[1] - product**2) <= apart
            factors = [
                Decimal(1) if zero else 1 - share * product / norm
                for zero, share, norm in zip(zeros, shares, norms, strict=True)
            ]
            if parallel and not any(zeros):
                factors = shares
            terms = zip(factors, pair, strict=True)
            vectors[left] = {i: by * x for by, v in terms for i, x in v.items()}
            norm, most = dot(vectors[left], vectors[left]), reach(vectors[left])
            nothing = precise and norm < rounded * most
            if most >= Decimal(TINY):
                widest = max(widest, most / norm if norm > 0 else Decimal("inf"))
        if nothing:
            return [0.0] * size, float(widest)
        return [float(vectors[last][i]) for i in range(size)], float(widest)


def adasum_coefficients(call: Call) -> None:
    """Write into `out` the coefficients of each segment, and find its spread."""
    coefficients, spread = tree_of(call.inputs[0], call.tree)
    call.out.copy_(coefficients)
    if call.spread is not None:
        call.spread.copy_(spread)


@torch.no_grad()
def weighed(tensors: Sequence[Tensor], coefficients: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return the sum of the tensors, times each segment's row of coefficients, flat."""
    flat = [one.double().view(-1) for one in tensors]
    total = torch.empty_like(flat[0])
    for row, low, high in zip(coefficients.tolist(), bounds[:-1], bounds[1:], strict=True):
        found = flat[0][low:high] * row[0]
        for one, factor in zip(flat[1:], row[1:], strict=True):
            # torch fuses the product with the sum, as the other back ends do.
            found = torch.add(found, one[low:high], alpha=factor)
        total[low:high] = found
    return total


def weighted_sum(call: Call) -> None:
    """Write `weighed` of the tensors."""
    assert call.table is not None
    _write(call, weighed(call.inputs, call.table, call.bounds))
