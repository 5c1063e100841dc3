"""Swing: recursive halving, then doubling, with partners that swing from one side to the other.

Wins on medium and large buffers where ranks lie on a ring or torus of links, so that messages
between far ranks share links: the partners of the steps are 1, 1, 3, 5, 11, ... ranks away, to the
one side and to the other, where those of `rechd` are 1, 2, 4, 8, 16, ... Steps, bytes and extra
memory are those of `rechd`: 2 log2 n steps, 2 (n - 1) / n of the buffer each way and half of it as
extra memory (powers of two; folding adds two steps, and the whole buffer as extra memory on the
ranks folded into). In step s of the first half rank r meets rank r + (-1)^r rho(s), where rho(s) is
the sum of (-2)^i for i <= s, and sends it what that one can still reach. Chunks meet the ranks in
different orders, so the schedule cannot carry an operator that needs one tree. Source: De Sensi,
Bonato, Saam and Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024,
the bandwidth-optimal variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from collectives.schedules.algorithm import Algorithm, by_size
from collectives.schedules.folding import Fold, fold_in, on_leaves
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer, back


def _distance(step: int) -> int:
    """Return rho(step) = 1 - 2 + 4 - ..., of step + 1 terms: how far even leaves look."""
    return (1 - (-2) ** (step + 1)) // 3


def _partner(leaf: int, step: int, leaves: int) -> int:
    away = _distance(step)
    return (leaf - away if leaf % 2 else leaf + away) % leaves


def _number(leaf: int, fold: Fold) -> int:
    """Return a number of the leaf whose bit s says which half of its chunks it keeps in step s.

    The distances of step s and all later ones are equal modulo 2^(s+1). So all even leaves that can
    still meet are equal modulo that, and so are the odd ones less the distance.
    """
    odd = leaf % 2
    even = (leaf - odd * _distance(fold.levels)) % fold.leaves
    return (even + odd * fold.leaves) // 2


@lru_cache(maxsize=64)
def _behind(fold: Fold) -> list[list[int]]:
    """Return how many ranks stand behind each leaf's chunks: by step, then by leaf."""
    counts = [2 if leaf < fold.extra else 1 for leaf in range(fold.leaves)]
    found = [counts]
    for step in range(fold.levels):
        counts = [
            count + counts[_partner(leaf, step, fold.leaves)] for leaf, count in enumerate(counts)
        ]
        found.append(counts)
    return found


def _swinging(fold: Fold, leaf: int) -> Iterator[Step]:
    start, stop, number = 0, fold.leaves, _number(leaf, fold)
    for step, behind in enumerate(_behind(fold)[: fold.levels]):
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if number >> step & 1 else (low, high)
        partner = _partner(leaf, step, fold.leaves)
        rank, leaves = fold.rank(partner), (behind[leaf], behind[partner])
        # Of a sum the sides do not matter; both partners put the lower leaf's value left.
        action = Action.REDUCE_LEFT if partner < leaf else Action.REDUCE_RIGHT
        yield Step(sends=(Transfer(rank, *give),), recvs=(Transfer(rank, *keep, action, leaves),))
        start, stop = keep


@lru_cache(maxsize=64)
def all_reduce(size: int) -> Schedule:
    """Return `swing`: 2 log2 n steps, 2 (n - 1) / n of the buffer each way."""
    fold = Fold(size)

    def steps(rank: int) -> Iterator[Step]:
        there = [*fold_in(fold, rank, fold.leaves), *on_leaves(fold, rank, _swinging)]
        yield from there
        yield from back(there)

    return Schedule("swing", size, fold.leaves, Collective.ALL_REDUCE, steps)


SWING = Algorithm(
    "swing",
    "recursive halving and doubling with nearer partners, for rings and tori of links",
    None,
    schedule=by_size(all_reduce),
)
