"""Memory that all ranks of a host share: signal pads, buffers and tables of every rank.

Every rank has a signal pad, which it alone writes. Signalling a call a rank posts one word there:
the call's number and a code of its description. The calls are the same where all pads hold the same
word, and no rank leaves a call before it has seen that. So none is ever more than one call ahead,
and two words a pad, used in turn, are enough. Where the words differ every rank sees it, for no
word is lost.

Every rank has two buffers, too, used in turn by calls: what it writes there before it signals a
call the others may use once all have signalled it, until it signals the next but one. Data thus
travel with the negotiation. Within a call ranks can give each other rows of small tables
(`gather_rows`) and wait for each other (`barrier`), as long as all do it alike.

A rank that waits sleeps at a gate, a futex which whoever posts last changes: so none is woken
before it can go on. Where there are no futexes it naps.

Order of memory accesses: a word is one aligned store, so nothing has to be ordered within a pad. A
rank signals before it sends a message of the call: send(2) and recv(2) take the lock of the
socket's queue, and a thread's mailbox has one, which orders what precedes the one before what
follows the other on every processor. `_fence`s stand between a buffer and its word, between a word
and the look whether it was the last (of the ranks that post at once, one sees all), and between a
gate's number and the last look before sleeping.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from collectives.errors import CollectiveTimeoutError, describe
from collectives.inference_mode import inference_mode
from collectives.stall import Stall
from collectives.transport.shared_memory import futex

Table = npt.NDArray[np.float64]
# A cache line: a rank that posts does not take the line that others write.
_PAD_BYTES = 64
_PAD = _PAD_BYTES // 8
# What a rank can put into a buffer, such as a bucket of 25 MiB with its padding, and the largest
# row of a table, such as the precise Gram matrices of 1,024 segments over 8 ranks. Memory only
# where it is written to.
BUFFER_BYTES = 32 * 1024 * 1024
TABLE_BYTES = 1024 * 1024
# Sizes and dtypes of buffers whose tensors are kept; making one costs some microseconds.
_MAX_ENTRIES = 256
# Words of a pad. The first two are those of calls, in turn; then how many barriers the rank has
# come to, and its processors: a hash of which ones, and how many. Each word has a gate.
_BARRIERS, _CORES, _WORDS = 2, 3, 4
# Above the code, which is never 0 in what was signalled: the call's number, from 1 to _NUMBERS.
CODE_BITS = 56
_NUMBERS = 255
# What a rank that has joined signals: no code of a description, so that it agrees with nobody.
JOINED = 0
# Checks before sleeping, after each of which another rank may have the processor: some 20 us.
_SPINS = 30
# Asleep no longer than this without a check whether a rank is gone.
_CHECK_SECONDS = 20e-3
# Seconds between two checks where there are no futexes.
_MIN_NAP, _MAX_NAP = 20e-6, 1e-3


def symmetric_memory_bytes(size: int) -> int:
    """Return how much memory `size` ranks share."""
    return _buffers_at(size) + 2 * size * (BUFFER_BYTES + TABLE_BYTES)


def _buffers_at(size: int) -> int:
    # Below the ranks' pads, the words that they sleep on.
    return -(-(size + 1) * _PAD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class RanksDiffer(Exception):
    """Another rank is in another call."""


class Peers(Protocol):
    """What symmetric memory needs of the transport whose ranks share it."""

    def gone(self) -> int | None:
        """Return a rank whose end is closed, if any."""
        ...

    def why_gone(self, peer: int) -> str:
        """Say why the end of a rank that is gone was closed."""
        ...

    def name(self, rank: int) -> int:
        """Return what errors call a rank."""
        ...

    def named(self, ranks: Iterable[int]) -> str:
        """Return what errors call ranks."""
        ...

    def abort(self, reason: str) -> None:
        """Withdraw, become unusable, and tell the other ranks why where that can be."""
        ...


class SymmetricMemory:
    """One rank's end. Every call of the group goes through `signal`, on all ranks.

    Args:
        memory: Shared, all zeros at first, `symmetric_memory_bytes(size)` long.
        rank: This rank.
        size: How many ranks share the memory.
        peers: The transport between them.
        cores: The processors that this rank may run on, any numbers for them. With fewer than
            ranks a rank that waits sleeps at once instead of looking some times before.
    """

    def __init__(
        self, memory: memoryview, rank: int, size: int, peers: Peers, *, cores: Collection[int]
    ) -> None:
        words = memory.cast("B").cast("Q")[: (size + 1) * _PAD]
        self._mine = words[rank * _PAD : (rank + 1) * _PAD]
        self._words = [words[word : size * _PAD : _PAD] for word in range(_WORDS)]
        self._mine[_CORES] = zlib.crc32(repr(sorted(cores)).encode()) << 32 | len(cores)
        self._gates = words[size * _PAD :].cast("B").cast("I")
        # Nobody may write outside inference mode to a tensor made inside it.
        with inference_mode(False):
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=symmetric_memory_bytes(size))
        self._gates_at = whole.data_ptr() + size * _PAD_BYTES
        buffers, tables = whole[_buffers_at(size) :].split(
            [2 * size * BUFFER_BYTES, 2 * size * TABLE_BYTES]
        )
        self._buffers = buffers.view(2, size, BUFFER_BYTES)
        self._tables: Table = tables.view(torch.float64).view(2, size, -1).numpy()
        self._views: dict[tuple[int, int, torch.dtype], Sequence[torch.Tensor]] = {}
        self._workers = 0
        self._barriers = 0
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()
        self._peers = peers
        self._calls = 0
        self._word = 0

    @property
    def workers(self) -> int:
        """How many ranks can work at once; within a call the same on all ranks.

        Ranks have their processors all in common, or each its own; too many where they share some.
        """
        if not self._workers:
            words = self._words[_CORES].tolist()
            count = sum(word & 0xFFFFFFFF for word in {*words})
            if 0 in words:
                # A rank is not there yet.
                return count
            self._workers = count
        return self._workers

    def next_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's buffer of the next call, to be written before that is signalled."""
        return self.buffers(numel, dtype, ahead=1)[self.rank]

    def buffers(self, numel: int, dtype: torch.dtype, ahead: int = 0) -> Sequence[torch.Tensor]:
        """Return all ranks' buffers of this call, by rank, to be used after `wait`.

        Whoever writes to them sees to it that no other rank uses these elements.

        Args:
            numel: Number of elements.
            dtype: Of the elements.
            ahead: 1 for the next call's.
        """
        # Calls take turns with two of them: a rank may fill the next one's while others read.
        key = (self._calls + ahead) % 2, numel, dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_ENTRIES:
                self._views.clear()
            with inference_mode(False):
                used = self._buffers[key[0], :, : numel * dtype.itemsize]
                views = self._views[key] = used.view(dtype).unbind()
        return views

    def signal(self, code: int) -> None:
        """Signal the next call: a code of CODE_BITS bits, not 0, or JOINED."""
        self._calls += 1
        self._word = (self._calls % _NUMBERS + 1) << CODE_BITS | code
        self._post(self._calls % 2, self._word)
        try:
            settled = self.all_signalled()
        except RanksDiffer:
            settled = True
        if settled:
            self._open(self._calls % 2, self._calls)

    def withdraw(self) -> None:
        """Be missing from this call: a rank that comes late must not take this one for there.

        Any thread may call it. This rank's own wait then ends by what its transport says.
        """
        self._mine[self._calls % 2] = 0

    def all_signalled(self) -> bool:
        """Whether all ranks have signalled this call.

        Raises:
            RanksDiffer: Where one is in another call.
        """
        words = self._words[self._calls % 2].tolist()
        if words.count(self._word) == self.size:
            return True
        number = self._word >> CODE_BITS
        for word in words:
            if word >> CODE_BITS == number and word != self._word:
                raise RanksDiffer
        return False

    def wait(self, step: str, timeout: float) -> None:
        """Return when all ranks have signalled this call.

        Raises:
            RanksDiffer: Where one is in another call.
            CollectiveTimeoutError: Naming the ranks that are missing after `timeout` seconds, or
                one that is gone.
        """
        if self.size > 1 and not self.all_signalled():
            word = self._calls % 2
            self._until(self.all_signalled, word, step, timeout)
        self._fence()

    def gather_rows(
        self, positions: Sequence[int], rows: Table, count: int, step: str, timeout: float
    ) -> Table:
        """Return the `count` rows that all ranks give, by position, after a barrier.

        Every rank that gives none calls `barrier` instead. To be read before this rank's next
        barrier.

        Args:
            positions: Where this rank's rows are in the table, one a rank at most.
            rows: This rank's, float64, TABLE_BYTES a row at most.
            count: Rows of all ranks.
            step: What an error calls this.
            timeout: Seconds.
        """
        table = self._tables[(self._barriers + 1) % 2, :count, : rows.shape[1]]
        for position, row in zip(positions, rows, strict=True):
            table[position] = row
        self.barrier(step, timeout)
        return table

    def barrier(self, step: str, timeout: float) -> None:
        """Return when all ranks have called it as often: what they wrote before can be read.

        Args:
            step: What an error calls this.
            timeout: Seconds.

        Raises:
            CollectiveTimeoutError: Naming the ranks that have not come in `timeout` seconds, or one
                that is gone.
        """
        self._barriers += 1
        self._post(_BARRIERS, self._barriers)
        if self._all_reached():
            self._open(_BARRIERS, self._barriers)
        else:
            self._until(self._all_reached, _BARRIERS, step, timeout)
        self._fence()

    def _all_reached(self) -> bool:
        """Whether all ranks have come to this barrier."""
        return min(self._words[_BARRIERS].tolist()) >= self._barriers

    def _open(self, word: int, number: int) -> None:
        """Wake those that wait at a word's gate. number: another one each time."""
        if futex.available:
            self._gates[word] = number & 0xFFFFFFFF
            futex.wake(self._gates_at + 4 * word)

    def _sleep(self, there: Callable[[], bool], word: int, waited: float, left: float) -> None:
        """Sleep until the last rank has posted, or a while, no longer than `left` seconds."""
        if not futex.available:
            # Late by an eighth at most.
            time.sleep(min(max(waited / 8, _MIN_NAP), _MAX_NAP))
            return
        number = self._gates[word]
        self._fence()
        if not there():
            futex.wait(self._gates_at + 4 * word, number, min(_CHECK_SECONDS, left))

    def _until(self, there: Callable[[], bool], word: int, step: str, timeout: float) -> None:
        """Return once `there()`; where anything else ends the wait tell the other ranks."""
        try:
            for _ in range(_SPINS if self.workers >= self.size else 0):
                if there():
                    return
                os.sched_yield()
            start = time.monotonic()
            stall: Stall | None = None
            while not there():
                # No rank leaves before all are there: one that is gone will never come, unless it
                # has come, as the last of all, since `there()` was asked.
                gone = self._peers.gone()
                if gone is not None and not there():
                    raise CollectiveTimeoutError(
                        f"{self._peers.named([self.rank])} got no answer from "
                        f"{self._peers.named([gone])} in {step}: {self._peers.why_gone(gone)}"
                    )
                waited = time.monotonic() - start
                if waited > timeout:
                    raise CollectiveTimeoutError(
                        f"{self._peers.named([self.rank])} got no answer from {self._late(word)} "
                        f"in {step} within {timeout:.3g} s"
                    )
                if waited > _CHECK_SECONDS:
                    me = self._peers.name(self.rank)
                    stall = stall or Stall(me, step, timeout, lambda: self._late(word))
                    stall.check()
                self._sleep(there, word, waited, timeout - waited)
        except RanksDiffer:
            raise
        except BaseException as error:
            self._peers.abort(describe(error))
            raise

    def _late(self, word: int) -> str:
        words = self._words[word].tolist()
        mine = words[self.rank]
        late = int.__lt__ if word == _BARRIERS else int.__ne__
        return self._peers.named(r for r, other in enumerate(words) if late(other, mine))

    def _post(self, word: int, value: int) -> None:
        """Write this rank's word between two fences, which share the second lock's use.

        Who sees it sees what this rank has written before; and this rank then reads what the others
        have posted no earlier than they see this, so of the last two ranks one finds all there.
        """
        with self._lock:
            pass
        with self._lock:
            self._mine[word] = value
        with self._lock:
            pass

    def _fence(self) -> None:
        """Keep the processor from moving memory accesses across this.

        What precedes a lock's release stays before it, what follows its acquisition stays after
        that, and a lock is not acquired again before its release.
        """
        with self._lock:
            pass
        with self._lock:
            pass
