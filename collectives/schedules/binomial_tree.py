"""Binomial trees: a broadcast, and a reduction to one rank.

ceil(log2 n) steps; the root sends, or receives, the whole buffer up to ceil(log2 n) times. Wins on
small and medium buffers. The reduction needs the whole buffer as extra memory where a rank
receives, and adds in the order of recursive doubling, so that sums have the bits of `rd`. Source:
Thakur, Rabenseifner and Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from collectives.schedules.folding import Fold
from collectives.schedules.schedule import IDLE, Action, Collective, Schedule, Step, Transfer


def _steps(size: int, root: int, rank: int) -> Iterator[Step]:
    position = (rank - root) % size
    distance = 1
    while distance < size:
        if position < distance and position + distance < size:
            yield Step(sends=(Transfer((rank + distance) % size, 0, 1),))
        elif distance <= position < 2 * distance:
            yield Step(recvs=(Transfer((rank - distance) % size, 0, 1),))
        else:
            yield IDLE
        distance *= 2


@lru_cache(maxsize=256)
def broadcast(size: int, root: int) -> Schedule:
    """Return the schedule that sends `root`'s buffer to every rank."""
    steps = partial(_steps, size, root)
    return Schedule("tree broadcast", size, 1, Collective.BROADCAST, steps, root=root)


def _reduce_steps(size: int, root: int, rank: int) -> Iterator[Step]:
    """Yield the steps by which `root` gets the reduction in the tree of `rd`.

    Leaves are those of folding, except that `root` stands for its pair itself.
    """
    fold = Fold(size)
    pairs = 2 * fold.extra
    away = [root ^ 1 if one in (root, root ^ 1) else one + 1 for one in range(0, pairs, 2)]
    if fold.extra:
        if rank >= pairs:
            yield IDLE
        else:
            yield _towards(rank ^ 1, first=rank % 2 == 0, receives=rank not in away)
    ranks = [rank for rank in range(size) if rank not in away]
    if rank in away:
        yield from [IDLE] * fold.levels
        return
    leaf, goal = ranks.index(rank), ranks.index(root)
    for level in range(fold.levels):
        # Those that differ from the root below this level have sent theirs.
        if (leaf ^ goal) % (1 << level):
            yield IDLE
        else:
            first, receives = leaf >> level & 1 == 0, (leaf ^ goal) >> level & 1 == 0
            yield _towards(ranks[leaf ^ 1 << level], first=first, receives=receives)


def _towards(peer: int, *, first: bool, receives: bool) -> Step:
    """Return a rank's step with `peer`; first: whether this rank's value is the left operand."""
    if not receives:
        return Step(sends=(Transfer(peer, 0, 1),))
    action = Action.REDUCE_RIGHT if first else Action.REDUCE_LEFT
    return Step(recvs=(Transfer(peer, 0, 1, action),))


@lru_cache(maxsize=256)
def reduce(size: int, root: int) -> Schedule:
    """Return the schedule that reduces all ranks' buffers onto `root`."""
    steps = partial(_reduce_steps, size, root)
    return Schedule("tree reduce", size, 1, Collective.REDUCE, steps, root=root)
