"""Which rank owns which variable when each variable is reduced onto one rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Assign every variable to the rank with the least load so far, the lowest such rank.

    The result depends on the arguments alone, so every rank computes the same.

    Args:
        numels: Elements (or bytes) of each variable, in an order that all ranks share.
        size: Number of ranks.

    Returns:
        The owner of each variable.

    Raises:
        TypeError: `numels` is no list, or a number of elements is not an int.
        ValueError: One is negative, or `size` is not a positive int.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive int, got {size!r}")
    given: object = numels
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"numels must be a list or tuple of ints, got {type(numels).__name__}")
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
