"""Whether accesses of different threads to one place are ordered: a detector of data races.

Orders are known by vector clocks. A block's clock counts the barriers its threads have passed
together; what a thread learns by acquiring becomes the block's at its next barrier. Of each place
the last store and the last load are kept, so a race with an earlier load can be missed, never
imagined. Stores of what is already there race with nobody: that is how flags are set.
Source: C. Flanagan, S. N. Freund: FastTrack (PLDI 2009), with barriers in the place of locks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.ptx.arithmetic import Array

# Bytes of the smallest access.
GRAIN = 2


class RaceError(RuntimeError):
    """Two accesses to one place, a store among them, that nothing orders."""


class Knowledge(NamedTuple):
    """blocks: of each block, the clock up to which (exclusive) its accesses are known. threads: of
    single threads, the time up to which (inclusive) theirs are."""

    blocks: Array
    threads: dict[int, int]

    def join(self, other: Knowledge) -> Knowledge:
        threads = dict(self.threads)
        for thread, time in other.threads.items():
            threads[thread] = max(time, threads.get(thread, -1))
        return Knowledge(np.maximum(self.blocks, other.blocks), threads)


class Clocks:
    """Who knows of what, in one launch of `blocks` blocks of `width` threads."""

    def __init__(self, blocks: int, width: int) -> None:
        self.width = width
        self.time = 0
        self.phase = np.zeros(blocks, np.int64)
        nothing = np.zeros(blocks, np.int64)
        self._of_block = [Knowledge(nothing, {}) for _ in range(blocks)]
        self._of_thread: dict[int, Knowledge] = {}
        self._at: dict[int, Knowledge] = {}

    def barrier(self, block: int) -> None:
        """All threads of a block have met."""
        self.phase[block] += 1
        for thread in [t for t in self._of_thread if t // self.width == block]:
            self._of_block[block] = self._of_block[block].join(self._of_thread.pop(thread))

    def _knows(self, thread: int) -> Knowledge:
        return self._of_thread.get(thread, self._of_block[thread // self.width])

    def release(self, thread: int, address: int) -> None:
        """What the thread knows, and has done itself, goes with the value at `address`."""
        block = thread // self.width
        known = self._knows(thread)
        blocks = known.blocks.copy()
        blocks[block] = self.phase[block]
        told = Knowledge(blocks, {**known.threads, thread: self.time})
        self._at[address] = self._at[address].join(told) if address in self._at else told

    def acquire(self, thread: int, address: int) -> None:
        """The thread learns what was released with the value at `address`."""
        if address in self._at:
            self._of_thread[thread] = self._knows(thread).join(self._at[address])

    def ordered(self, before: Array, phase: Array, time: Array, now: Array) -> Array:
        """Whether accesses by threads `before`, in their block's `phase` at `time`, come before
        what the threads `now` do."""
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
    """Who touched each grain of a region last, and when; -1 where nobody has."""

    def __init__(self, size: int) -> None:
        grains = -(-size // GRAIN)
        self.thread = np.full(grains, -1, np.int64)
        self.phase = np.zeros(grains, np.int64)
        self.time = np.zeros(grains, np.int64)

    def set(self, grains: Array, threads: Array, phases: Array, time: int) -> None:
        self.thread[grains], self.phase[grains], self.time[grains] = threads, phases, time

    def unordered(self, grains: Array, threads: Array, clocks: Clocks) -> Array:
        """Indices into `grains` of those whose last access is not before the threads' now."""
        last = self.thread[grains]
        at = np.flatnonzero((last >= 0) & (last != threads))
        if len(at) == 0:
            return at
        place = grains[at]
        before = clocks.ordered(last[at], self.phase[place], self.time[place], threads[at])
        return at[~before]


class Races:
    """The accesses to the regions of one address space. Raises RaceError."""

    def __init__(self, sizes: list[int], clocks: Clocks) -> None:
        self._sizes, self._clocks = sizes, clocks
        self._shadows: dict[int, tuple[_Shadow, _Shadow]] = {}

    def _grains(self, places: Array, size: int, threads: Array) -> tuple[Array, Array]:
        spread = places[:, None] // GRAIN + np.arange(max(1, size // GRAIN))
        return spread.reshape(-1), np.repeat(threads, spread.shape[1])

    def _of(self, region: int) -> tuple[_Shadow, _Shadow]:
        if region not in self._shadows:
            size = self._sizes[region]
            self._shadows[region] = _Shadow(size), _Shadow(size)
        return self._shadows[region]

    def _phases(self, threads: Array) -> Array:
        return self._clocks.phase[threads // self._clocks.width]

    def read(self, region: int, places: Array, size: int, threads: Array, text: str) -> None:
        grains, who = self._grains(places, size, threads)
        stored, loaded = self._of(region)
        bad = stored.unordered(grains, who, self._clocks)
        if len(bad):
            raise RaceError(
                f"{text}: thread {who[bad[0]]} loads what thread {stored.thread[grains[bad[0]]]} "
                f"has stored, and nothing orders the two ({len(bad)} such places)"
            )
        loaded.set(grains, who, self._phases(who), self._clocks.time)

    def write(
        self, region: int, places: Array, size: int, threads: Array, changed: Array, text: str
    ) -> None:
        grains, who = self._grains(places, size, threads)
        differs = np.repeat(changed, len(grains) // max(1, len(places)))
        stored, loaded = self._of(region)
        for verb, shadow in (("stored", stored), ("loaded", loaded)):
            bad = shadow.unordered(grains, who, self._clocks)
            bad = bad[differs[bad]]
            if len(bad):
                raise RaceError(
                    f"{text}: thread {who[bad[0]]} stores where thread "
                    f"{shadow.thread[grains[bad[0]]]} has {verb}, and nothing orders the two "
                    f"({len(bad)} such places)"
                )
        stored.set(grains, who, self._phases(who), self._clocks.time)
