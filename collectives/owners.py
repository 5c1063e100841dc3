"""Assign owners to variables: the rank onto which each variable is reduced."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch

from collectives import validation


def owners(numels: Sequence[int], size: int) -> list[int]:
    """Assign each variable to the rank with the least load so far; of several, to the lowest one.

    The result depends on the arguments alone, so all ranks compute the same owners. numels: The
    elements (or bytes) of each variable, in the same order on all ranks.
    """
    validation.integer("size", size, 1)
    given: object = numels
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"numels must be a list or tuple of ints, got {type(numels).__name__}")
    # A heap of (load, rank): tuples are compared by the load, and by the rank if loads are equal.
    load = [(0, rank) for rank in range(size)]
    answer = []
    for i, numel in enumerate(numels):
        validation.integer(f"numels[{i}]", numel, 0)
        least, rank = load[0]
        heapq.heapreplace(load, (least + numel, rank))
        answer.append(rank)
    return answer
