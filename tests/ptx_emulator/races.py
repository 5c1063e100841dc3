"""A detector of data races: are the accesses of different threads to one address ordered?

Vector clocks hold the order. A block's clock is when its threads have last passed a barrier; what
a thread learns by acquiring becomes its block's at the next one. Of each address the last
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
        blocks: For each block of its node, the time before which its accesses do.
        threads: For single threads, the time up to which theirs do, and which block of the node
            each is of.
    """

    blocks: Array
    threads: dict[int, tuple[int, int]]


class Clocks:
    """The vector clocks of launches that run together.

    Blocks and threads are numbered through, from launch to launch.

    Args:
        grids: How many blocks each launch has.
        width: Threads of a block.
        ranks: Whose each launch is.
        nodes: Of which node each launch's rank is. Nothing orders the accesses of two nodes.
    """

    def __init__(
        self, grids: Sequence[int], width: int, ranks: Sequence[int], nodes: Sequence[int]
    ) -> None:
        self.width = width
        self.time = 0
        blocks = sum(grids)
        self.ranks = np.repeat(ranks, grids)
        self._first = np.repeat(np.cumsum(grids) - grids, grids)
        self._alone = len(grids) == 1
        # When each block has passed its last barrier.
        self._since = np.zeros(blocks, np.int64)
        self._node = np.repeat(nodes, grids)
        # The number of each block among those of its node.
        self._place = np.zeros(blocks, np.int64)
        for node in {*nodes}:
            mine = self._node == node
            self._place[mine] = np.arange(mine.sum())
        # By block: what all of its threads know, and what single ones have learnt since.
        self._blocks = np.zeros((blocks, 1 + int(self._place.max(initial=0))), np.int64)
        self._threads: list[dict[int, tuple[int, int]]] = [{} for _ in range(blocks)]
        self._learnt: defaultdict[int, dict[int, Knowledge]] = defaultdict(dict)
        # By address and rank; what was released to all ranks also under None.
        self._at: dict[tuple[int, int | None], Knowledge] = {}
        # What a thread has acquired there last.
        self._seen: dict[tuple[int, tuple[int, int | None]], Knowledge] = {}

    def rank(self, threads: Array) -> Array:
        """Return the ranks of threads."""
        ranks: Array = self.ranks[threads // self.width]
        return ranks

    def name(self, thread: int) -> str:
        """Return what messages call a thread."""
        block = thread // self.width
        own = f"thread {thread - int(self._first[block]) * self.width}"
        return own if self._alone else f"{own} of rank {self.ranks[block]}"

    def _join(self, *known: Knowledge) -> Knowledge:
        """Return what is known by any."""
        blocks = reduce(np.maximum, [one.blocks for one in known])
        times = blocks.tolist()
        threads: dict[int, tuple[int, int]] = {}
        for one in known:
            for thread, when in one.threads.items():
                # Not those before their blocks' times, which say as much.
                if when[0] >= times[when[1]] and when >= threads.get(thread, when):
                    threads[thread] = when
        return Knowledge(blocks, threads)

    def barrier(self, blocks: Array) -> None:
        """Let blocks pass a barrier, at which the threads of each share what each has learnt."""
        self._since[blocks] = self.time + 1
        for block in self._learnt.keys() & {*blocks.tolist()}:
            learnt = self._learnt.pop(block).values()
            held = Knowledge(self._blocks[block], self._threads[block])
            self._blocks[block], self._threads[block] = self._join(held, *learnt)

    def follow(self, ended: Array, begun: Array) -> None:
        """Let the blocks of a launch begin when those before it on its stream have ended."""
        self.barrier(ended)
        held = [Knowledge(self._blocks[block], self._threads[block]) for block in ended]
        blocks, threads = self._join(*held)
        self._blocks[begun] = blocks
        self._blocks[np.ix_(begun, self._place[ended])] = self._since[ended]
        for block in begun:
            self._threads[block] = threads

    def _knows(self, thread: int) -> Knowledge:
        block = thread // self.width
        learnt = self._learnt[block].get(thread) if block in self._learnt else None
        return learnt or Knowledge(self._blocks[block], self._threads[block])

    def release(self, thread: int, address: int, system: bool) -> None:
        """Publish with the value at `address` what the thread knows and has done.

        system: To all ranks, else to those of its GPU.
        """
        block = thread // self.width
        known, place = self._knows(thread), int(self._place[block])
        blocks = known.blocks.copy()
        blocks[place] = self._since[block]
        released = Knowledge(blocks, {**known.threads, thread: (self.time, place)})
        rank = int(self.ranks[block])
        for key in [(address, rank), (address, None)][: 1 + system]:
            held = self._at.get(key)
            self._at[key] = released if held is None else self._join(held, released)

    def acquire(self, thread: int, address: int, system: bool) -> None:
        """Let the thread learn what was released with the value at `address`.

        system: By any rank, else by threads of its GPU.
        """
        block = thread // self.width
        rank = int(self.ranks[block])
        for key in [(address, rank), (address, None)][: 1 + system]:
            held = self._at.get(key)
            if held is not None and self._seen.get((thread, key)) is not held:
                self._learnt[block][thread] = self._join(self._knows(thread), held)
                self._seen[thread, key] = held

    def ordered(self, before: Array, time: Array, now: Array) -> Array:
        """Return whether earlier accesses come before what the threads `now` do.

        Args:
            before: The threads of the earlier accesses.
            time: When those were.
            now: For each of them, the thread that accesses the same address now.
        """
        block, here = before // self.width, now // self.width
        same = (before == now) | ((block == here) & (time < self._since[here]))
        beside = self._node[block] == self._node[here]
        same |= beside & (time < self._blocks[here, self._place[block]])
        for i in np.flatnonzero(~same & beside):
            known = self._knows(int(now[i]))
            then = known.threads.get(int(before[i]), (-1, -1))[0]
            same[i] = time[i] < known.blocks[self._place[block[i]]] or time[i] <= then
        return same


class _Shadow:
    """The last access to each grain: its thread and its time."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        # In the lower bits the thread's number and one: memory of zeros is there when written to.
        self._held = np.zeros(0, np.int64)
        self._bits = (len(clocks.ranks) * clocks.width).bit_length()
        self.used = False

    def cover(self, grains: int) -> None:
        """Make room for so many grains."""
        if grains > len(self._held):
            made = np.zeros(2 * grains, np.int64)
            if self.used:
                made[: len(self._held)] = self._held
            self._held = made

    def last(self, grains: Array) -> tuple[Array, Array]:
        """Return threads, -1 for none, and times of the last accesses to some grains."""
        held = self._held[grains]
        return (held & ((1 << self._bits) - 1)) - 1, held >> self._bits

    def set(self, grains: Array, threads: Array, times: int | Array) -> None:
        """Record accesses."""
        self.used = True
        self._held[grains] = (threads + 1) | (times << self._bits)

    def unordered(self, grains: Array, threads: Array) -> Array:
        """Return the indices into `grains` whose last access is not ordered before this one."""
        if not self.used:
            return np.zeros(0, np.int64)
        last, times = self.last(grains)
        at = np.flatnonzero((last >= 0) & (last != threads))
        if len(at) == 0:
            return at
        return at[~self._clocks.ordered(last[at], times[at], threads[at])]


class Races:
    """The last accesses to the regions of one address space. Methods raise RaceError.

    Args:
        sizes: Bytes of each region.
        clocks: The order of what threads do.
    """

    def __init__(self, sizes: Array, clocks: Clocks) -> None:
        self._sizes, self._clocks = sizes.astype(np.int64), clocks
        # Where the grains of a region begin, -1 before its first access.
        self._first, self._used = np.full(len(sizes), -1), 0
        self._stored, self._loaded = _Shadow(clocks), _Shadow(clocks)
        # Of the thread that loaded before the last one that did.
        self._loaded_earlier = _Shadow(clocks)
        # Of the scope of a GPU, and of the system.
        self._atomics = _Shadow(clocks), _Shadow(clocks)

    def _grains(
        self, region: Array, offsets: Array, size: int, threads: Array
    ) -> tuple[Array, Array]:
        """Return the grains that are accessed, and by which threads."""
        if (self._first[region] < 0).any():
            for one in np.unique(region[self._first[region] < 0]):
                self._first[one] = self._used
                self._used += int(-(-self._sizes[one] // GRAIN))
            shadows = (self._stored, self._loaded, self._loaded_earlier, *self._atomics)
            for shadow in shadows:
                shadow.cover(self._used)
        first = self._first[region] + offsets // GRAIN
        spread = first[:, None] + np.arange(max(1, size // GRAIN))
        return spread.reshape(-1), np.repeat(threads, spread.shape[1])

    def _check(
        self,
        shadow: _Shadow,
        grains: Array,
        who: Array,
        does: str,
        done: str,
        counts: Array | bool = True,
    ) -> None:
        """Raise RaceError unless the accesses in `shadow` are ordered before these.

        Args:
            shadow: The earlier accesses.
            grains: What is accessed now.
            who: By which threads.
            does: The instruction now.
            done: What the earlier accesses did, in words.
            counts: For each grain, whether a race there matters.
        """
        bad = shadow.unordered(grains, who)
        if len(bad):
            bad = bad[np.broadcast_to(counts, grains.shape)[bad]]
        if len(bad):
            now, earlier = who[bad[0]], int(shadow.last(grains[bad[:1]])[0][0])
            raise RaceError(
                f"{does} by {self._clocks.name(now)} where {self._clocks.name(earlier)} has "
                f"{done}, and nothing orders the two ({len(bad)} such grains)"
            )

    def read(self, region: Array, offsets: Array, size: int, threads: Array, text: str) -> None:
        """Record loads, which race with stores and atomics."""
        grains, who = self._grains(region, offsets, size, threads)
        self._check(self._stored, grains, who, text, "stored")
        for shadow in self._atomics:
            self._check(shadow, grains, who, text, "updated atomically")
        loaded, time = self._loaded, self._clocks.time
        before = loaded.last(grains)
        others = (before[0] >= 0) & (before[0] != who)
        if others.any():
            self._loaded_earlier.set(grains[others], *(of[others] for of in before))
        loaded.set(grains, who, time)
        beside = loaded.last(grains)[0] != who
        if beside.any():
            self._loaded_earlier.set(grains[beside], who[beside], time)

    def write(
        self,
        region: Array,
        offsets: Array,
        size: int,
        threads: Array,
        changed: Array,
        text: str,
    ) -> None:
        """Record stores; `changed` says for each whether it changes what was there."""
        grains, who = self._grains(region, offsets, size, threads)
        differs = np.repeat(changed, len(grains) // max(1, len(offsets)))
        self._check(self._stored, grains, who, text, "stored", differs)
        self._check(self._loaded, grains, who, text, "loaded", differs)
        self._check(self._loaded_earlier, grains, who, text, "loaded", differs)
        for shadow in self._atomics:
            self._check(shadow, grains, who, text, "updated atomically")
        self._stored.set(grains, who, self._clocks.time)

    def strong_read(
        self, region: Array, offsets: Array, size: int, threads: Array, system: bool, text: str
    ) -> None:
        """Check loads that may themselves order others: they race with no atomic of all ranks."""
        grains, who = self._grains(region, offsets, size, threads)
        self._check(self._stored, grains, who, text, "stored")
        self._check_atomics(grains, who, text, system)

    def _check_atomics(self, grains: Array, who: Array, text: str, system: bool) -> None:
        """Raise RaceError where an atomic of another rank is none to this one."""
        for scope, shadow in zip((False, True), self._atomics, strict=True):
            if shadow.used and not (scope and system):
                others = self._clocks.rank(np.maximum(shadow.last(grains)[0], 0))
                differs = others != self._clocks.rank(who)
                done = "updated atomically, in the scope of a GPU"
                self._check(shadow, grains, who, text, done, differs)

    def atomic(
        self, region: Array, offsets: Array, size: int, threads: Array, text: str, system: bool
    ) -> None:
        """Record an atomic, which races with loads and stores but with no other atomic."""
        grains, who = self._grains(region, offsets, size, threads)
        self._check_atomics(grains, who, text, system)
        self._check(self._stored, grains, who, text, "stored")
        self._check(self._loaded, grains, who, text, "loaded")
        self._check(self._loaded_earlier, grains, who, text, "loaded")
        self._atomics[system].set(grains, who, self._clocks.time)
