"""The result an all-reduce should have, in float64, and how far rounding may take one from it.

No rank holds more than its slice of the others' inputs: every rank computes one slice of the
expected result and of its error bound, and all ranks compare their own results with every slice.
None of it uses this library's collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import split_bounds
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology

# A rank, the average of a node's ranks, or a pair of trees.
Tree = Any


@dataclass(frozen=True)
class Average:
    """A leaf of a tree: the average of the ranks of one node."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Expected values and how far each may be off, both float64 and 1-D."""

    value: Tensor
    bound: Tensor


def inputs(count: int, dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Return the input of `rank`, on the CPU: a part that all ranks share and a part of its own.

    So Adasum's dot products are neither those of equal nor those of orthogonal vectors. Integers
    are small enough that no sum of 64 ranks leaves 8 bits.
    """
    own = torch.Generator().manual_seed(seed * 1_000_003 + rank + 1)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, (count,), generator=own).to(dtype)
    common = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=common)
    return values.add_(torch.randn(count, generator=own)).to(dtype)


def mean(parts: Sequence[Tensor], dtype: torch.dtype, divisor: int) -> tuple[Tensor, Tensor]:
    """Return the sum of float64 tensors over `divisor`, and how far rounding may take it.

    Summed in any order, a value rounds n - 1 times, each time by eps of at most the sum of the
    magnitudes, and once more where it is divided (before or after). eps is twice the error of
    rounding to nearest, which bounds one rounding of any kind.
    """
    roundings = len(parts) - 1 + (divisor > 1)
    value, magnitude = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    for part in parts:
        value += part
        magnitude += part.abs()
    eps, least = roundings_of(dtype)
    return value / divisor, roundings * (eps * magnitude + least) / divisor


def roundings_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return eps, and what one rounding may lose below the normal range."""
    if not dtype.is_floating_point:
        return 0.0, 0.0
    finfo = torch.finfo(dtype)
    return finfo.eps, finfo.smallest_normal * finfo.eps


def tree_of(spec: AllReduceSpec, topology: Topology) -> Tree:
    """Return the order in which Adasum by `spec` joins the ranks, as nested pairs."""
    leaves: list[Tree] = list(range(topology.size))
    if spec.inner is not None:
        leaves = [Average(tuple(topology.ranks_of(w))) for w in range(topology.num_nodes)]
    # For Adasum `auto` chooses among algorithms with vhdd's tree.
    order = algorithm("vhdd" if spec.outer == "auto" else spec.outer).order
    if order is None:
        raise ValueError(f"{spec.outer!r} does not carry Adasum")
    return order.tree(leaves)


def _ranks_behind(tree: Tree) -> int:
    """Return how many ranks' inputs a tree joins, by which Adasum weighs it."""
    if isinstance(tree, Average):
        return len(tree.ranks)
    return 1 if isinstance(tree, int) else sum(map(_ranks_behind, tree))


def expected(mine: Tensor, op: str, tree: Tree) -> Slice:
    """Return this rank's slice of the result; `mine` is its whole input. All ranks must call it."""
    parts = [part.double() for part in _slices(mine)]
    if op == "adasum":
        return _adasum(tree, parts, mine.dtype)
    return Slice(*mean(parts, mine.dtype, len(parts) if op == "avg" else 1))


def count_wrong(result: Tensor, answer: Slice) -> int:
    """Count elements of all ranks' results that are beyond their bounds. All ranks must call it."""
    wrong = torch.zeros(1, dtype=torch.int64, device=result.device)
    for part in _slices(result):
        # A NaN is never near.
        wrong += ((part.double() - answer.value).abs() <= answer.bound).logical_not().sum()
    dist.all_reduce(wrong)
    return int(wrong)


def _slices(mine: Tensor) -> list[Tensor]:
    """Return this rank's slice of every rank's tensor."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = [mine.new_empty(0)] * size
    for owner, (begin, end) in enumerate(pairwise(split_bounds(mine.numel(), size))):
        if begin == end:
            continue
        piece = mine[begin:end].contiguous()
        gathered = [torch.empty_like(piece) for _ in range(size)] if owner == rank else None
        dist.gather(piece, gathered, dst=owner)
        found = gathered or found
    return found


def _adasum(tree: Tree, parts: Sequence[Tensor], dtype: torch.dtype) -> Slice:
    """Return the tree's Adasum, with its bound to first order in eps."""
    if isinstance(tree, int):
        return Slice(parts[tree], torch.zeros_like(parts[tree]))
    if isinstance(tree, Average):
        return Slice(*mean([parts[rank] for rank in tree.ranks], dtype, len(tree.ranks)))
    a, b = (_adasum(side, parts, dtype) for side in tree)
    p, q = map(_ranks_behind, tree)
    x, y = a.value.abs(), b.value.abs()
    sums = [a.value @ b.value, x @ x, y @ y, x @ y]
    # How far the dot and the norms are moved by what the operands are off already.
    sums += [x @ b.bound + y @ a.bound, 2 * (x @ a.bound), 2 * (y @ b.bound)]
    total = torch.stack(sums)
    dist.all_reduce(total)
    dot, norm_a, norm_b, crossed, moved, moved_a, moved_b = total.tolist()
    # A tile's products are added in the working precision, 2^14 of them at most, as a tree of
    # 14 levels at best; tiles are added in float64.
    working = torch.float64 if dtype == torch.float64 else torch.float32
    products = 16 * torch.finfo(working).eps
    off = moved + products * crossed
    value, bound = torch.zeros_like(a.value), torch.zeros_like(a.value)
    # Coefficient, its product, the sum and the result are rounded: 4 times half an eps.
    eps, least = roundings_of(dtype)
    for side, size, norm, moved_norm, weight in (
        (a, x, norm_a, moved_a, p / (p + q)),
        (b, y, norm_b, moved_b, q / (p + q)),
    ):
        factor = 1 - weight * dot / norm if norm else 1.0
        slack = (off + abs(dot) * (products + moved_norm / norm)) * weight / norm if norm else 0.0
        value += factor * side.value
        bound += abs(factor) * (side.bound + 2 * eps * size) + slack * size
    return Slice(value, bound + least)
