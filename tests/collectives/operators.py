"""Operators that users write, which need all ranks' operands at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from collectives import Needs, Operands, Reducer


class TrimmedMean(Reducer):
    """The mean of each element without its `trim` least and `trim` greatest values."""

    needs = Needs.ALL_OPERANDS
    averages = True

    def __init__(self, trim: int = 1, *, shared: bool = False) -> None:
        self.name = f"TrimmedMean({trim})"
        self.trim = trim
        self.reduces_in_shared_memory = shared

    def check(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise TypeError(f"{self.name} is of floating-point numbers, not of {dtype}")

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            out.copy_(trimmed(torch.stack(parts), self.trim))


def trimmed(values: torch.Tensor, trim: int) -> torch.Tensor:
    """The trimmed mean over the first dimension; of too few values the mean of all."""
    if len(values) <= 2 * trim:
        return values.mean(0)
    return values.sort(0).values[trim : len(values) - trim].mean(0)


class Longest(Reducer):
    """Of each segment that rank's operand which has the largest norm."""

    name = "Longest"
    needs = Needs.ALL_OPERANDS | Needs.ONE_TREE
    averages = True

    def __init__(self, *, shared: bool = False) -> None:
        self.reduces_in_shared_memory = shared

    def check(self, dtype: torch.dtype) -> None:
        pass

    def reduce(self, operands: Operands) -> None:
        bounds = (0, operands.numel) if operands.segments is None else operands.segments
        squares = torch.zeros(len(bounds) - 1, len(operands.pieces[0].parts), dtype=torch.float64)
        for parts, out, start in operands.pieces:
            for i, here in _inside(bounds, start, out.numel()):
                squares[i] += torch.stack([part[here].double().square().sum() for part in parts])
        if operands.sum_partials is not None:
            operands.sum_partials(squares)
        for parts, out, start in operands.pieces:
            for i, here in _inside(bounds, start, out.numel()):
                out[here] = parts[int(squares[i].argmax())][here].clone()


def _inside(bounds: Sequence[int], start: int, count: int) -> Iterator[tuple[int, slice]]:
    """Each segment's number, and where it lies in the piece [start, start + count)."""
    for i, (low, high) in enumerate(pairwise(bounds)):
        low, high = max(low - start, 0), min(high - start, count)
        if low < high:
            yield i, slice(low, high)


def longest(values: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Every segment of that row which has the largest norm, in float64."""
    chosen = values[0].clone()
    for low, high in pairwise(bounds):
        norms = values[:, low:high].double().norm(dim=1)
        chosen[low:high] = values[int(norms.argmax()), low:high]
    return chosen


class ByRank(Reducer):
    """The sum of all operands, each multiplied by its rank plus one."""

    name = "ByRank"
    needs = Needs.ALL_OPERANDS
    averages = False

    def check(self, dtype: torch.dtype) -> None:
        pass

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            out.copy_(sum((rank + 1) * part for rank, part in enumerate(parts)))
