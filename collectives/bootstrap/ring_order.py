"""The order in which a ring visits the ranks of a node: the cycle along the fastest hops.

Exact, by dynamic programming over the sets of ranks that are still to be visited. Source: Held and
Karp, "A dynamic programming approach to sequencing problems", J. SIAM 10(1), 1962.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_RANKS = 16
"""Nodes with more ranks keep their natural order: time and memory double with every rank."""

_Table = npt.NDArray[np.float64]


def ring_order(speeds: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The cycle from rank 0 on whose slowest hop is fastest, then whose hops' sum is greatest.

    Of equals the lexicographically smallest: the natural order 0, 1, ..., n - 1 wherever it is as
    good as the best. Natural, too, for more than MOST_RANKS ranks.

    speeds: [from][to], the greater the faster; the diagonal is not looked at.
    """
    size = len(speeds)
    if not 3 < size <= MOST_RANKS:
        # To 3 ranks there is but one cycle.
        return tuple(range(size))
    table = np.array(speeds, dtype=np.float64)
    np.fill_diagonal(table, -np.inf)
    levels = np.unique(table[np.isfinite(table)])
    # Every cycle has its hops at levels[low] or above; none has at levels[high + 1].
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _ways_back(_at_least(table, levels[middle]))[-1, 0] > -np.inf:
            low = middle
        else:
            high = middle - 1
    return _smallest(_at_least(table, levels[low]))


def _at_least(table: _Table, level: Any) -> _Table:
    return np.where(table >= level, table, -np.inf)


def _ways_back(table: _Table) -> _Table:
    """[set][rank]: the greatest sum of the hops from `rank` through all of the set and on to 0.

    Rank r is in the set where bit r - 1 is 1; -inf where there is no way.
    """
    size = len(table)
    sets = np.arange(1 << (size - 1))
    counts = sum((sets >> bit) & 1 for bit in range(size - 1))
    best = np.full((len(sets), size), -np.inf)
    best[0] = table[:, 0]
    for count in range(1, size):
        those = sets[counts == count]
        for rank in range(1, size):
            bit = 1 << (rank - 1)
            having = those[those & bit > 0]
            onward = table[:, rank] + best[having ^ bit, rank][:, None]
            best[having] = np.maximum(best[having], onward)
    return best


def _smallest(table: _Table) -> tuple[int, ...]:
    """The lexicographically smallest of the cycles with the greatest sum."""
    best = _ways_back(table)
    left, order = len(best) - 1, [0]
    while left:
        here = order[-1]
        for rank in range(1, len(table)):
            rest = left & ~(1 << (rank - 1))
            # The very sum that made it the best: no rounding comes between.
            if rest != left and table[here, rank] + best[rest, rank] == best[left, here]:
                order.append(rank)
                left = rest
                break
    return tuple(order)
