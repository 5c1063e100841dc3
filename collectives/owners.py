"""Which rank owns which variable when each variable is reduced onto one rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch

from collectives import validation


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Assign every variable to the rank with the least load so far, the lowest such rank.

    The result depends on the arguments alone, so every rank computes the same.

    Args:
        numels: Elements (or bytes) of each variable, in an order that all ranks share.
        size: Number of ranks.

    Returns:
        The owner of each variable.

    Raises:
        TypeError: `numels` is no list, or a number of elements or `size` is not an int.
        ValueError: One is negative, or `size` is less than 1.
    """
    validation.integer("size", size, 1)
    given: object = numels
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"numels must be a list or tuple of ints, got {type(numels).__name__}")
    load = [(0, rank) for rank in range(size)]
    answer = []
    for i, numel in enumerate(numels):
        validation.integer(f"numels[{i}]", numel, 0)
        least, rank = load[0]
        heapq.heapreplace(load, (least + numel, rank))
        answer.append(rank)
    return answer
