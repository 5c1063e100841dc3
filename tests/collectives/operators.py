"""Operators that users write, which need all ranks' operands at once."""

from __future__ import annotations

from itertools import pairwise

import torch

from collectives import Operands, Reducer


class TrimmedMean(Reducer):
    """The mean of each element without its `trim` least and `trim` greatest values."""

    operands = "all"
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


class Medoid(Reducer):
    """Of each segment that rank's operand which is nearest to all others."""

    name = "Medoid"
    operands = "all"
    averages = True
    needs_one_tree = True

    def __init__(self, *, shared: bool = False) -> None:
        self.reduces_in_shared_memory = shared

    def check(self, dtype: torch.dtype) -> None:
        pass

    def reduce(self, operands: Operands) -> None:
        bounds = (0, operands.numel) if operands.segments is None else operands.segments
        for parts, out, start in operands.pieces:
            stop = start + out.numel()
            inside = [min(max(bound, start), stop) - start for bound in bounds]
            assert start in bounds and stop in bounds
            out.copy_(medoid(torch.stack(parts), inside))


def medoid(values: torch.Tensor, bounds: list[int] | tuple[int, ...]) -> torch.Tensor:
    """The medoid of every segment of the rows, in float64."""
    chosen = values[0].clone()
    for low, high in pairwise(bounds):
        part = values[:, low:high].double()
        apart = (part[:, None] - part[None]).square().sum(-1).sum(1)
        chosen[low:high] = values[int(apart.argmin()), low:high]
    return chosen


class ByRank(Reducer):
    """The sum of all operands, each multiplied by its rank plus one."""

    name = "ByRank"
    operands = "all"

    def check(self, dtype: torch.dtype) -> None:
        pass

    def reduce(self, operands: Operands) -> None:
        for parts, out, _ in operands.pieces:
            out.copy_(sum((rank + 1) * part for rank, part in enumerate(parts)))
