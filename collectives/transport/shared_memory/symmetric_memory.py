"""Where ranks that share memory tell each other what they are about to do, without a message.

One row a rank, which it alone writes. Entering a call a rank posts one word: the call's number and
a hash of its description. The ranks agree where all rows hold the same word, and no rank leaves a
call before it has seen that. So none is ever more than one call ahead, and two words a row, used in
turn, are enough.

Where the words differ every rank sees it, for no word is lost; some may have sent messages of a
call that will not be. Then all stop, none sends any more; when all have stopped each discards what
has come to it; and when all have done that no message is under way and the group is as before the
call.

Beside its row every rank has two windows, used in turn by calls: what it shows there before it
enters a call the others may use once all have entered it, until it enters the next but one. Data
thus travel with the agreement. Within a call ranks can show each other small tables (`gather`)
and wait for each other (`meet`), as long as all do it alike.

A rank that waits sleeps at a gate, a futex which whoever posts last changes: so none is woken
before it can go on. Where there are no futexes it naps.

Order of memory accesses: a word is one aligned store, so nothing has to be ordered within a row. A
rank posts before it sends a message of the call: send(2) and recv(2) take the lock of the socket's
queue, and a thread's mailbox has one, which orders what precedes the one before what follows the
other on every processor. It does not order a message before what its sender does next: so `_fence`s
stand around the words that say that a rank stopped, or has discarded all. Others stand between a
window and its word, one between a word and the look whether it was the last (of the ranks that post
at once, one sees all), and one between a gate's number and the last look before sleeping.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from collectives.errors import CollectiveTimeoutError
from collectives.transport.shared_memory import futex

Table = npt.NDArray[np.float64]
# A cache line: a rank that posts does not take the line that others write.
ROW_BYTES = 64
_ROW = ROW_BYTES // 8
# What a rank can show in a call, such as a bucket of 25 MiB with its padding, and the largest row
# of a table. Memory only where it is written to.
WINDOW_BYTES = 32 * 1024 * 1024
TABLE_BYTES = 64 * 1024
# Of the windows, kept as tensors; making one costs some microseconds.
_MOST_VIEWS = 256
_STOPPED, _CLEAN, _MET = 2, 3, 4
# Each rank's processors: a hash of which ones, and how many. Gates are as the columns, and one.
_CORES, _COLUMNS = 5, 6
_END = 5
# Above the hash, which is never 0 in what was posted: the call's number, from 1 to _NUMBERS.
HASH_BITS = 56
_NUMBERS = 255
# What a rank that has joined posts: no hash of a description, so that it agrees with nobody.
JOINED = 0
# Looks before sleeping, which may give way to another rank: some 20 us.
_LOOKS = 30
# Asleep no longer than this without a look whether a rank is gone; without futexes, between looks.
_GLANCE = 20e-3
_SHORTEST, _LONGEST = 20e-6, 1e-3


def board_bytes(size: int) -> int:
    """The memory of a board of `size` ranks."""
    return _windows_at(size) + 2 * size * (WINDOW_BYTES + TABLE_BYTES)


def _windows_at(size: int) -> int:
    # Below the ranks' rows, the words that they sleep on.
    return -(-(size + 1) * ROW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class RanksDiffer(Exception):
    """Another rank is in another call: what was sent in this one means nothing."""


class Windows:
    """What all ranks show in a call: `vectors` by rank. Views are kept: one costs microseconds."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self.vectors = vectors
        self._parts: dict[tuple[int, int, int], torch.Tensor] = {}

    def part(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a rank's vector."""
        key = rank, start, stop
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= _MOST_VIEWS:
                self._parts.clear()
            with torch.inference_mode(False):
                part = self._parts[key] = self.vectors[rank][start:stop]
        return part


class Peers(Protocol):
    """What the board needs of the transport whose ranks it joins."""

    def gone(self) -> int | None:
        """A rank whose end is closed, if any."""
        ...

    def last_words(self, peer: int) -> str:
        """Why the end of a rank that is gone was closed."""
        ...

    def discard(self) -> None:
        """Forget the messages under way: no rank sends any, and no other rank has begun to."""
        ...

    def abandon(self, reason: str) -> None:
        """Withdraw, be of no use any more, and tell the other ranks why where that can be."""
        ...


class Board:
    """One rank's view. Every call of the group goes through `enter`, on all ranks.

    memory: shared, all zeros at first, board_bytes(size). cores: the processors that this rank may
    run on, any numbers for them. With fewer than ranks a rank that waits sleeps at once instead of
    looking some times before.
    """

    def __init__(
        self, memory: memoryview, rank: int, size: int, peers: Peers, *, cores: Collection[int]
    ) -> None:
        words = memory.cast("B").cast("Q")[: (size + 1) * _ROW]
        self._mine = words[rank * _ROW : (rank + 1) * _ROW]
        self._columns = [words[column : size * _ROW : _ROW] for column in range(_COLUMNS)]
        self._mine[_CORES] = zlib.crc32(repr(sorted(cores)).encode()) << 32 | len(cores)
        self._gates = words[size * _ROW :].cast("B").cast("I")
        # Nobody may write outside inference mode to a tensor made inside it.
        with torch.inference_mode(False):
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=board_bytes(size))
        self._gates_at = whole.data_ptr() + size * ROW_BYTES
        windows, tables = whole[_windows_at(size) :].split(
            [2 * size * WINDOW_BYTES, 2 * size * TABLE_BYTES]
        )
        self._windows = windows.view(2, size, WINDOW_BYTES)
        self._tables: Table = tables.view(torch.float64).view(2, size, -1).numpy()
        self._kept: dict[tuple[int, int, torch.dtype], Windows] = {}
        self._workers = 0
        self._met = 0
        self.rank = rank
        self._size = size
        self._lock = threading.Lock()
        self._peers = peers
        self._calls = 0
        self._word = 0
        self.watched = False

    @property
    def workers(self) -> int:
        """How many ranks can work at once; within a call the same on all ranks.

        Ranks have their processors all in common, or each its own; too many where they share some.
        """
        if not self._workers:
            words = self._columns[_CORES].tolist()
            count = sum(word & 0xFFFFFFFF for word in {*words})
            if 0 in words:
                # A rank is not there yet.
                return count
            self._workers = count
        return self._workers

    def window(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Where this rank shows `numel` elements in the next call, before it enters that."""
        return self._views(self._calls + 1, numel, dtype).vectors[self.rank]

    def windows(self, numel: int, dtype: torch.dtype) -> Windows:
        """What all ranks show in this call, after `wait`.

        Whoever writes to them sees to it that no other rank uses these elements.
        """
        return self._views(self._calls, numel, dtype)

    def _views(self, call: int, numel: int, dtype: torch.dtype) -> Windows:
        key = call % 2, numel, dtype
        views = self._kept.get(key)
        if views is None:
            if len(self._kept) >= _MOST_VIEWS:
                self._kept.clear()
            with torch.inference_mode(False):
                shown = self._windows[call % 2, :, : numel * dtype.itemsize]
                views = self._kept[key] = Windows(shown.view(dtype).unbind())
        return views

    def enter(self, code: int) -> None:
        """Post the next call: a hash of HASH_BITS bits, not 0, or JOINED."""
        self._calls += 1
        self._word = (self._calls % _NUMBERS + 1) << HASH_BITS | code
        self._fence()
        self._post(self._calls % 2, self._word, self._settled)

    def withdraw(self) -> None:
        """Be missing from this call: a rank that comes late must not take this one for there."""
        self._mine[self._calls % 2] = 0

    def agreed(self) -> bool:
        """Whether all ranks have entered this call; RanksDiffer where one is in another."""
        words = self._columns[self._calls % 2].tolist()
        if words.count(self._word) == self._size:
            return True
        number = self._word >> HASH_BITS
        if any(word != self._word and word >> HASH_BITS == number for word in words):
            raise RanksDiffer
        return False

    def _settled(self) -> bool:
        """Whether the ranks have agreed or differ."""
        try:
            return self.agreed()
        except RanksDiffer:
            return True

    def glance(self) -> None:
        """For a transport that is about to wait, or has met a message it cannot take.

        RanksDiffer where messages were sent in good faith (`watched`) and the ranks differ.
        """
        if self.watched:
            self.agreed()

    def wait(self, step: str, timeout: float) -> None:
        """Return when all ranks have entered this call; RanksDiffer where one is in another.

        Raises CollectiveTimeoutError naming the ranks that are missing after `timeout` seconds, or
        one that is gone.
        """
        if self._size > 1 and not self.agreed():
            column = self._calls % 2
            self._until(self.agreed, column, step, timeout, column)
        self._fence()

    def gather(
        self, places: Sequence[int], rows: Table, count: int, step: str, timeout: float
    ) -> Table:
        """The `count` rows that all ranks give by place, this one `rows` (float64) at `places`.

        TABLE_BYTES a row and one place a rank at most. To be read before this rank's next meeting.
        A meeting, as `meet`; every rank that gives none meets instead.
        """
        table = self._tables[(self._met + 1) % 2, :count, : rows.shape[1]]
        for place, row in zip(places, rows, strict=True):
            table[place] = row
        self.meet(step, timeout)
        return table

    def meet(self, step: str, timeout: float, times: int = 1, *, last: bool = False) -> None:
        """Return when all ranks have called it as often: what they wrote before can be read.

        times: for so many calls at once, in none of which the others wait for this rank; `timeout`
        is then for all of them. last: of the collective, which ranks that leave out others wait
        for; alike on all ranks.
        """
        seen = self._met
        self._met += times
        gate = _END if last else _MET
        self._fence()
        self._mine[_MET] = self._met
        self._fence()
        reached = self._reached()
        while seen < reached:
            # Others that go on from a meeting which this rank leaves out may have waited for it
            # alone. They may have gone on before the gate says so: look again.
            self._open(gate if reached >= self._met else _MET, reached)
            seen = reached
            if reached < self._met:
                self._fence()
                reached = self._reached()
        if reached < self._met:
            self._until(self._all_met, _MET, step, timeout, gate)
        self._fence()

    def _reached(self) -> int:
        """How many meetings all ranks have come to."""
        return min(self._columns[_MET].tolist())

    def _all_met(self) -> bool:
        return self._reached() >= self._met

    def clear(self, step: str, timeout: float) -> None:
        """Once the ranks differ, on all of them: no message is under way when this returns."""
        for column in (_STOPPED, _CLEAN):
            if column == _CLEAN:
                self._peers.discard()
            entries = self._columns[column]

            def all_there(entries: memoryview = entries) -> bool:
                return entries.tolist().count(self._calls) == self._size

            self._fence()
            self._post(column, self._calls, all_there)
            self._until(all_there, column, step, timeout, column)
            self._fence()

    def _post(self, column: int, word: int, enough: Callable[[], bool]) -> None:
        """Say it to all; where that is `enough` for those that wait, wake them."""
        self._mine[column] = word
        self._fence()
        if enough():
            self._open(column, self._calls)

    def _open(self, gate: int, number: int) -> None:
        """Wake those that wait at the gate. number: another one each time that they wait there."""
        if futex.available:
            self._gates[gate] = number & 0xFFFFFFFF
            futex.wake(self._gates_at + 4 * gate)

    def _sleep(self, there: Callable[[], bool], gate: int, waited: float, left: float) -> None:
        """Until the last rank has posted, or for a while, no longer than for `left` seconds."""
        if not futex.available:
            # Late by an eighth at most.
            time.sleep(min(max(waited / 8, _SHORTEST), _LONGEST))
            return
        number = self._gates[gate]
        self._fence()
        if not there():
            futex.wait(self._gates_at + 4 * gate, number, min(_GLANCE, left))

    def _until(
        self, there: Callable[[], bool], column: int, step: str, timeout: float, gate: int
    ) -> None:
        try:
            self._sleep_until(there, column, step, timeout, gate)
        except RanksDiffer:
            raise
        except BaseException as error:
            self._peers.abandon(str(error) or type(error).__name__)
            raise

    def _sleep_until(
        self, there: Callable[[], bool], column: int, step: str, timeout: float, gate: int
    ) -> None:
        for _ in range(_LOOKS if self.workers >= self._size else 0):
            if there():
                return
            os.sched_yield()
        start = time.monotonic()
        while not there():
            # No rank leaves before all are there: one that is gone will never come. It may have
            # been there, and the last of all, since the look.
            gone = self._peers.gone()
            if gone is not None and not there():
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from rank {gone} in {step}: "
                    f"{self._peers.last_words(gone)}"
                )
            waited = time.monotonic() - start
            if waited > timeout:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from {self._late(column)} in {step} within "
                    f"{timeout:.3g} s"
                )
            self._sleep(there, gate, waited, timeout - waited)

    def _late(self, column: int) -> str:
        entries = self._columns[column].tolist()
        mine = entries[self.rank]
        late = int.__lt__ if column == _MET else int.__ne__
        return ", ".join(f"rank {rank}" for rank, other in enumerate(entries) if late(other, mine))

    def _fence(self) -> None:
        """Keep the processor from moving memory accesses across this.

        What precedes a lock's release stays before it, what follows its acquisition stays after
        that, and a lock is not acquired again before its release.
        """
        with self._lock:
            pass
        with self._lock:
            pass
