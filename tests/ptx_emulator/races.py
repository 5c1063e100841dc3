"""Whether accesses of different threads to one place are ordered: a detector of data races.

Orders are known by vector clocks. A block's clock counts the barriers its threads have passed
together; what a thread learns by acquiring becomes the block's at its next barrier. Of each place
the last store, the last atomic and the last loads of two threads are kept, so a race between blocks
with an earlier load can be missed, never imagined; two are enough for the threads of one block.
Stores of what is already there race with no store or load: that is how flags are set.
Source: C. Flanagan, S. N. Freund: FastTrack (PLDI 2009), with barriers in the place of locks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.ptx_emulator.arithmetic import Array

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

    def set(self, grains: Array, threads: Array, phases: Array, time: int | Array) -> None:
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


class _Region:
    """What is known of `size` bytes: loaded_too of the last to load but one. Two of the four are
    made when they are needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.stored, self.loaded = _Shadow(size), _Shadow(size)
        self.loaded_too: _Shadow | None = None
        self.counted: _Shadow | None = None

    def load(self, grains: Array, threads: Array, phases: Array, time: int) -> None:
        """Note loads."""
        loaded = self.loaded
        earlier = loaded.thread[grains]
        others = grains[(earlier >= 0) & (earlier != threads)]
        if len(others):
            before = loaded.thread[others], loaded.phase[others], loaded.time[others]
            self.loaded_too = self.loaded_too or _Shadow(self._size)
            self.loaded_too.set(others, *before)
        loaded.set(grains, threads, phases, time)
        beside = loaded.thread[grains] != threads
        if beside.any():
            self.loaded_too = self.loaded_too or _Shadow(self._size)
            self.loaded_too.set(grains[beside], threads[beside], phases[beside], time)

    def count(self, grains: Array, threads: Array, phases: Array, time: int) -> None:
        """Note atomics."""
        self.counted = self.counted or _Shadow(self._size)
        self.counted.set(grains, threads, phases, time)


class Races:
    """The accesses to the regions of one address space. Raises RaceError."""

    def __init__(self, sizes: list[int], clocks: Clocks) -> None:
        self._sizes, self._clocks = sizes, clocks
        self._regions: dict[int, _Region] = {}

    def _grains(self, places: Array, size: int, threads: Array) -> tuple[Array, Array]:
        spread = places[:, None] // GRAIN + np.arange(max(1, size // GRAIN))
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
        """RaceError unless the accesses that `shadow` knows are ordered before these. counts: for
        each grain, whether it matters."""
        if shadow is None:
            return
        bad = shadow.unordered(grains, who, self._clocks)
        bad = bad[np.broadcast_to(counts, grains.shape)[bad]]
        if len(bad):
            raise RaceError(
                f"{does} by thread {who[bad[0]]} where thread {shadow.thread[grains[bad[0]]]} has "
                f"{done}, and nothing orders the two ({len(bad)} such places)"
            )

    def read(self, region: int, places: Array, size: int, threads: Array, text: str) -> None:
        grains, who = self._grains(places, size, threads)
        known = self._of(region)
        self._check(known.stored, grains, who, text, "stored")
        self._check(known.counted, grains, who, text, "counted up")
        known.load(grains, who, self._phases(who), self._clocks.time)

    def write(
        self, region: int, places: Array, size: int, threads: Array, changed: Array, text: str
    ) -> None:
        grains, who = self._grains(places, size, threads)
        differs = np.repeat(changed, len(grains) // max(1, len(places)))
        known = self._of(region)
        self._check(known.stored, grains, who, text, "stored", differs)
        self._check(known.loaded, grains, who, text, "loaded", differs)
        self._check(known.loaded_too, grains, who, text, "loaded", differs)
        self._check(known.counted, grains, who, text, "counted up")
        known.stored.set(grains, who, self._phases(who), self._clocks.time)

    def count(self, region: int, places: Array, size: int, threads: Array, text: str) -> None:
        """An atomic: it races with no other, but with loads and stores."""
        grains, who = self._grains(places, size, threads)
        known = self._of(region)
        self._check(known.stored, grains, who, text, "stored")
        self._check(known.loaded, grains, who, text, "loaded")
        self._check(known.loaded_too, grains, who, text, "loaded")
        known.count(grains, who, self._phases(who), self._clocks.time)
