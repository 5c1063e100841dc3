"""Which rank keeps which variable when every variable is reduced to one rank alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def owners(numels: Sequence[int], size: int) -> list[int]:
    """The owner of each variable: the rank with the least so far, the lowest of equals.

    numels: elements (or bytes) of each variable, in an order that all ranks share. The answer
    depends on the arguments alone, so every rank finds the same.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive int, got {size!r}")
    load = [(0, rank) for rank in range(size)]
    answer = []
    for i, numel in enumerate(numels):
        if isinstance(numel, bool) or not isinstance(numel, int):
            raise TypeError(f"numels[{i}] must be an int, got {type(numel).__name__}")
        if numel < 0:
            raise ValueError(f"numels[{i}] must not be negative, got {numel}")
        least, rank = load[0]
        heapq.heapreplace(load, (least + numel, rank))
        answer.append(rank)
    return answer
