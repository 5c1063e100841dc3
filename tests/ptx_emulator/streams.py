"""Launches of several ranks at once, whose accesses that order others are in a random order.

`launch_together` draws who of each node makes the next atomic access, or load that may order
others. All else goes on by itself, in any order: what it does changes nothing for other blocks, nor
do they for it, unless there is a race. Races are found by the order that atomics make (races.py),
whichever of two accesses is made first. So orders that differ in nothing but such steps would be
the same run again. What is drawn is a basic block, of which such an access is the last instruction;
its threads' atomics are in a random order, among those of blocks that go on there at once.

Nodes share nothing. Those that run beside each other are so many runs, whose threads numpy takes
together, and their steps between such accesses wait for each other to be many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ptx_emulator.arithmetic import Array
from tests.ptx_emulator.launches import Launch, Machine, Started, set_up
from tests.ptx_emulator.machine import HangError, Residents

# Steps, for each block, after which launches count as hung.
_MAX_STEPS = 20_000
# Draws for which ranks keep their pace.
_SAME_PACE = 16
# How often a block of theirs stands still that would only find what it found before.
_PATIENCE = 0.97
# Basic blocks at most that are run between two draws. One that spins without an atomic access
# would hold up the others.
_WITHOUT_DRAW = 1000


def launch_together(started: Sequence[Started], *, seed: int = 0, races: bool = True) -> None:
    """Run launches of several ranks at once, each on a GPU of its own, to their ends.

    Which go on is drawn anew for each access that orders others, so that their programs are
    interleaved; how often each rank's do changes, so that now one and now another stands nearly
    still.

    Args:
        started: Their launches, of equally many threads a block; those of a rank in order.
        seed: Of everything that is random.
        races: Whether to look for data races, those between ranks among them.

    Raises:
        NotImplementedError, AccessError, RaceError, HangError: As `launch` does.
    """
    machine, launches = set_up(started, seed, races, dependent=False)
    with np.errstate(all="ignore"):
        _Streams(machine, launches).finish()


class _Streams:
    """The launches of all ranks, of which each begins when its rank's one before has ended.

    Blocks of one program run together, whichever launch they are of, unless traffic is counted.
    """

    def __init__(self, machine: Machine, launches: Sequence[Launch]) -> None:
        self._machine, self._launches = machine, launches
        pools: dict[object, list[Launch]] = {}
        self._coming: dict[int, list[Launch]] = {}
        for one in launches:
            pools.setdefault(id(one.program if one.traffic is None else one), []).append(one)
            self._coming.setdefault(one.rank, []).append(one)
        self._pools = [
            Residents(some, [machine.random.permutation(one.grid) for one in some], asleep=True)
            for some in pools.values()
        ]
        self._pool = {id(one): pool for pool in self._pools for one in pool.launches}
        # When the first of each rank's launches begins that has not.
        self._begins = {rank: coming[0].delay for rank, coming in self._coming.items()}
        # How often each rank's blocks go on, at most 1.
        self._pace = np.ones(1 + max(one.rank for one in launches))
        # Nodes that draw nobody before blocks have come to where they do what orders others.
        self._stands = np.ones(1 + max(one.node for one in launches), bool)

    def finish(self) -> None:
        """Run all to their ends."""
        random, machine = self._machine.random, self._machine
        most = _MAX_STEPS * sum(one.grid for one in self._launches)
        steps = -sum(one.delay for one in self._launches)
        while steps < most:
            machine.now += 1
            if machine.now % _SAME_PACE == 1:
                self._pace = np.array([1.0, 0.3, 0.02])[random.integers(3, size=len(self._pace))]
            # Many nodes go on as one, for numpy's sake.
            if 2 * self._stands.sum() >= len({one[0].node for one in self._coming.values()}):
                steps += self._settle()
                self._stands[:] = False
            if not self._coming:
                return
            steps += 1
            for pool, position, blocks in self._draw():
                self._end(pool.go(position, blocks))
        stand = "; ".join(filter(None, (pool.where() for pool in self._pools)))
        raise HangError(f"{self._pools[0].name}: no end after {most} basic blocks: {stand}")

    def _settle(self) -> int:
        """Run what needs no draw, launches that begin among it; return how many basic blocks."""
        steps, moves = 0, True
        while moves and steps < _WITHOUT_DRAW:
            steps, moves = steps + 1, False
            for rank in [k for k, at in self._begins.items() if at < self._machine.now]:
                del self._begins[rank]
                self._pool[id(self._coming[rank][0])].wake(self._coming[rank][0])
            for pool in self._pools:
                blocks = pool.unseen()
                if len(blocks):
                    moves = True
                    self._end(pool.go(int(pool.behind[blocks[0]]), blocks))
        return steps

    def _draw(self) -> list[tuple[Residents, int, Array]]:
        """Return for each node some blocks, by where they all are in one program."""
        random = self._machine.random
        some = [pool.going(_PATIENCE) for pool in self._pools]
        pool = np.repeat(np.arange(len(some)), [len(blocks) for blocks in some])
        if len(pool) == 0:
            self._stands[:] = True
            if not any(one.awake for one in self._pools):
                self._machine.now = max(self._machine.now, min(self._begins.values()))
            return []
        block = np.concatenate(some)
        node, rank, at = (
            np.concatenate([of[blocks] for of, blocks in zip(each, some, strict=True)])
            for each in zip(*((one.node, one.rank, one.behind) for one in self._pools), strict=True)
        )
        pace, at = self._pace[rank], at * len(some) + pool
        # The first of a node in an order that is drawn by pace goes on. Of those beside it there,
        # which atomics of an instruction take in turns, some do.
        first = random.exponential(size=len(pace)) / pace
        order = np.lexsort((first, node))
        nodes, leads = np.unique(node[order], return_index=True)
        drawn = order[leads]
        mine = np.searchsorted(nodes, node)
        share = np.array([0.5, 1.0])[random.integers(2, size=len(nodes))][mine] * pace
        goes = (at == at[drawn][mine]) & (random.random(len(share)) < share)
        goes[drawn] = True
        # One that is on its way to its next such access has to come there first.
        ready = np.zeros(len(goes), bool)
        for k, one in enumerate(self._pools):
            ready[pool == k] = one.seen[one.behind[some[k]]]
        goes &= ready & ~self._stands[node]
        self._stands |= np.bincount(node[goes], minlength=len(self._stands)) == 0
        return [
            (self._pools[one % len(some)], one // len(some), block[goes & (at == one)])
            for one in np.unique(at[goes]).tolist()
        ]

    def _end(self, ended: Sequence[Launch]) -> None:
        """Let the next of each rank's launches begin."""
        for one in ended:
            coming = self._coming[one.rank]
            coming.pop(0)
            if coming:
                if self._machine.clocks:
                    self._machine.clocks.follow(one.blocks, coming[0].blocks)
                self._begins[one.rank] = self._machine.now - 1 + coming[0].delay
            else:
                del self._coming[one.rank]
