"""A detector of data races: are the accesses of different threads to one address ordered?

Vector clocks hold the order. A block's clock counts the barriers that its threads have passed;
what a thread learns by acquiring becomes its block's at the next barrier. Of each address the last
store, the last atomic and the last loads of two threads are kept. So a race with a load of another
block's can be missed when two others have loaded since, but none is reported that is not there; for
the threads of one block two are enough. A store of the value that is there already races with no
store or load: several threads may set one flag.

Of launches that run together each is a rank, on a GPU of its own. What a thread releases with the
scope of its GPU no other rank acquires, and there an atomic of that scope is none.

Source: C. Flanagan, S. N. Freund: FastTrack (PLDI 2009), with barriers in place of locks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from tests.ptx_emulator.arithmetic import Array

# Bytes of the smallest access, by which memory is followed.
GRAIN = 2


class RaceError(RuntimeError):
    """Nothing orders two accesses to one address, one of which is a store."""


class Knowledge(NamedTuple):
    """Which accesses come before what one thread does next.

    Attributes:
        blocks: For each block, the clock before which its accesses do.
        threads: For single threads, the time up to which theirs do.
    """

    blocks: Array
    threads: dict[int, int]

    def join(self, other: Knowledge) -> Knowledge:
        """Return what is known by either."""
        threads = dict(self.threads)
        for thread, time in other.threads.items():
            threads[thread] = max(time, threads.get(thread, -1))
        return Knowledge(np.maximum(self.blocks, other.blocks), threads)


class Clocks:
    """The vector clocks of launches that run together.

    Blocks and threads are numbered through, from launch to launch.

    Args:
        grids: How many blocks each launch has.
        width: Threads of a block.
        ranks: Whose each launch is.
    """

    def __init__(self, grids: Sequence[int], width: int, ranks: Sequence[int]) -> None:
        self.width = width
        self.time = 0
        blocks = sum(grids)
        self.ranks = np.repeat(ranks, grids)
        self._first = np.repeat(np.cumsum(grids) - grids, grids)
        self._alone = len(grids) == 1
        self.phase = np.zeros(blocks, np.int64)
        nothing = np.zeros(blocks, np.int64)
        self._of_block = [Knowledge(nothing, {}) for _ in range(blocks)]
        # By block and thread.
        self._of_thread: defaultdict[int, dict[int, Knowledge]] = defaultdict(dict)
        # By address and rank; what was released to all ranks also under None.
        self._at: dict[tuple[int, int | None], Knowledge] = {}

    def rank(self, threads: Array) -> Array:
        """Return the ranks of threads."""
        ranks: Array = self.ranks[threads // self.width]
        return ranks

    def name(self, thread: int) -> str:
        """Return what messages call a thread."""
        block = thread // self.width
        own = f"thread {thread - int(self._first[block]) * self.width}"
        return own if self._alone else f"{own} of rank {self.ranks[block]}"

    def barrier(self, block: int) -> None:
        """Let a block pass a barrier, at which its threads share what each has learnt."""
        self.phase[block] += 1
        for learnt in self._of_thread.pop(block, {}).values():
            self._of_block[block] = self._of_block[block].join(learnt)

    def follow(self, ended: Array, begun: Array) -> None:
        """Let the blocks of a launch begin when those before it on its stream have ended."""
        for block in ended:
            self.barrier(int(block))
        known = reduce(Knowledge.join, [self._of_block[block] for block in ended])
        blocks = known.blocks.copy()
        blocks[ended] = self.phase[ended]
        for block in begun:
            self._of_block[block] = Knowledge(blocks, known.threads)

    def _knows(self, thread: int) -> Knowledge:
        block = thread // self.width
        return self._of_thread.get(block, {}).get(thread, self._of_block[block])

    def release(self, thread: int, address: int, system: bool) -> None:
        """Publish with the value at `address` what the thread knows and has done.

        system: To all ranks, else to those of its GPU.
        """
        block = thread // self.width
        known = self._knows(thread)
        blocks = known.blocks.copy()
        blocks[block] = self.phase[block]
        released = Knowledge(blocks, {**known.threads, thread: self.time})
        rank = int(self.ranks[block])
        for key in [(address, rank), (address, None)][: 1 + system]:
            held = self._at.get(key)
            self._at[key] = released if held is None else held.join(released)

    def acquire(self, thread: int, address: int, system: bool) -> None:
        """Let the thread learn what was released with the value at `address`.

        system: By any rank, else by threads of its GPU.
        """
        rank = int(self.ranks[thread // self.width])
        for key in [(address, rank), (address, None)][: 1 + system]:
            held = self._at.get(key)
            if held is not None:
                self._of_thread[thread // self.width][thread] = self._knows(thread).join(held)

    def ordered(self, before: Array, phase: Array, time: Array, now: Array) -> Array:
        """Return whether earlier accesses come before what the threads `now` do.

        Args:
            before: The threads of the earlier accesses.
            phase: How many barriers their blocks had passed then.
            time: When that was.
            now: For each of them, the thread that accesses the same address now.
        """
        block, here = before // self.width, now // self.width
        same = (before == now) | ((block == here) & (phase < self.phase[here]))
        for one in np.unique(here[~same]):
            mine = here == one
            same[mine] |= phase[mine] < self._of_block[one].blocks[block[mine]]
        for i in np.flatnonzero(~same):
            known = self._knows(int(now[i]))
            same[i] = phase[i] < known.blocks[block[i]] or time[i] <= known.threads.get(
                int(before[i]), -1
            )
        return same


class _Shadow:
    """The thread of the last access to each grain of a region, -1 for none, and its time."""

    def __init__(self, size: int) -> None:
        grains = -(-size // GRAIN)
        self.thread = np.full(grains, -1, np.int64)
        self.phase = np.zeros(grains, np.int64)
        self.time = np.zeros(grains, np.int64)

    def set(self, grains: Array, threads: Array, phases: Array, time: int | Array) -> None:
        """Record accesses."""
        self.thread[grains], self.phase[grains], self.time[grains] = threads, phases, time

    def unordered(self, grains: Array, threads: Array, clocks: Clocks) -> Array:
        """Return the indices into `grains` whose last access is not ordered before this one."""
        last = self.thread[grains]
        at = np.flatnonzero((last >= 0) & (last != threads))
        if len(at) == 0:
            return at
        chosen = grains[at]
        before = clocks.ordered(last[at], self.phase[chosen], self.time[chosen], threads[at])
        return at[~before]


class _Region:
    """The last accesses to `size` bytes; two of the four shadows are made when first needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.stored, self.loaded = _Shadow(size), _Shadow(size)
        # Of the thread that loaded before the last one that did.
        self.loaded_earlier: _Shadow | None = None
        # Of the scope of a GPU, and of the system.
        self.atomics: list[_Shadow | None] = [None, None]

    def load(self, grains: Array, threads: Array, phases: Array, time: int) -> None:
        """Record loads."""
        loaded = self.loaded
        earlier = loaded.thread[grains]
        others = grains[(earlier >= 0) & (earlier != threads)]
        if len(others):
            before = loaded.thread[others], loaded.phase[others], loaded.time[others]
            self.loaded_earlier = self.loaded_earlier or _Shadow(self._size)
            self.loaded_earlier.set(others, *before)
        loaded.set(grains, threads, phases, time)
        beside = loaded.thread[grains] != threads
        if beside.any():
            self.loaded_earlier = self.loaded_earlier or _Shadow(self._size)
            self.loaded_earlier.set(grains[beside], threads[beside], phases[beside], time)

    def atomic(self, grains: Array, threads: Array, phases: Array, time: int, system: bool) -> None:
        """Record atomics."""
        shadow = self.atomics[system] = self.atomics[system] or _Shadow(self._size)
        shadow.set(grains, threads, phases, time)


class Races:
    """The accesses to the regions of one address space. Methods raise RaceError."""

    def __init__(self, sizes: list[int], clocks: Clocks) -> None:
        self._sizes, self._clocks = sizes, clocks
        self._regions: dict[int, _Region] = {}

    def _grains(self, offsets: Array, size: int, threads: Array) -> tuple[Array, Array]:
        spread = offsets[:, None] // GRAIN + np.arange(max(1, size // GRAIN))
        return spread.reshape(-1), np.repeat(threads, spread.shape[1])

    def _of(self, region: int) -> _Region:
        if region not in self._regions:
            self._regions[region] = _Region(self._sizes[region])
        return self._regions[region]

    def _phases(self, threads: Array) -> Array:
        return self._clocks.phase[threads // self._clocks.width]

    def _check(
        self,
        shadow: _Shadow | None,
        grains: Array,
        who: Array,
        does: str,
        done: str,
        counts: Array | bool = True,
    ) -> None:
        """Raise RaceError unless the accesses in `shadow` are ordered before these.

        Args:
            shadow: The earlier accesses, None where there are none.
            grains: What is accessed now.
            who: By which threads.
            does: The instruction now.
            done: What the earlier accesses did, in words.
            counts: For each grain, whether a race there matters.
        """
        if shadow is None:
            return
        bad = shadow.unordered(grains, who, self._clocks)
        if len(bad):
            bad = bad[np.broadcast_to(counts, grains.shape)[bad]]
        if len(bad):
            now, earlier = who[bad[0]], shadow.thread[grains[bad[0]]]
            raise RaceError(
                f"{does} by {self._clocks.name(now)} where {self._clocks.name(earlier)} has "
                f"{done}, and nothing orders the two ({len(bad)} such grains)"
            )

    def read(self, region: int, offsets: Array, size: int, threads: Array, text: str) -> None:
        """Record loads, which race with stores and atomics."""
        grains, who = self._grains(offsets, size, threads)
        last = self._of(region)
        self._check(last.stored, grains, who, text, "stored")
        for shadow in last.atomics:
            self._check(shadow, grains, who, text, "updated atomically")
        last.load(grains, who, self._phases(who), self._clocks.time)

    def write(
        self, region: int, offsets: Array, size: int, threads: Array, changed: Array, text: str
    ) -> None:
        """Record stores; `changed` says for each whether it changes what was there."""
        grains, who = self._grains(offsets, size, threads)
        differs = np.repeat(changed, len(grains) // max(1, len(offsets)))
        last = self._of(region)
        self._check(last.stored, grains, who, text, "stored", differs)
        self._check(last.loaded, grains, who, text, "loaded", differs)
        self._check(last.loaded_earlier, grains, who, text, "loaded", differs)
        for shadow in last.atomics:
            self._check(shadow, grains, who, text, "updated atomically")
        last.stored.set(grains, who, self._phases(who), self._clocks.time)

    def strong_read(
        self, region: int, offsets: Array, size: int, threads: Array, system: bool, text: str
    ) -> None:
        """Check loads that may themselves order others: they race with no atomic of all ranks."""
        grains, who = self._grains(offsets, size, threads)
        last = self._of(region)
        self._check(last.stored, grains, who, text, "stored")
        self._check_atomics(last, grains, who, text, system)

    def _check_atomics(
        self, last: _Region, grains: Array, who: Array, text: str, system: bool
    ) -> None:
        """Raise RaceError where an atomic of another rank is none to this one."""
        for scope, shadow in zip((False, True), last.atomics, strict=True):
            if shadow is not None and not (scope and system):
                others = self._clocks.rank(np.maximum(shadow.thread[grains], 0))
                differs = others != self._clocks.rank(who)
                done = "updated atomically, in the scope of a GPU"
                self._check(shadow, grains, who, text, done, differs)

    def atomic(
        self, region: int, offsets: Array, size: int, threads: Array, text: str, system: bool
    ) -> None:
        """Record an atomic, which races with loads and stores but with no other atomic."""
        grains, who = self._grains(offsets, size, threads)
        last = self._of(region)
        self._check_atomics(last, grains, who, text, system)
        self._check(last.stored, grains, who, text, "stored")
        self._check(last.loaded, grains, who, text, "loaded")
        self._check(last.loaded_earlier, grains, who, text, "loaded")
        last.atomic(grains, who, self._phases(who), self._clocks.time, system)
