"""Ranks in few words."""

from __future__ import annotations

from collections.abc import Sequence


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs of consecutive ones, each [first, last]."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def compact(ranks: Sequence[int]) -> str:
    """Return ranks in their order, such as "0-3, 6"."""
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs(ranks))
