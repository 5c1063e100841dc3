"""Memory that all ranks of a host share: signal pads, buffers and tables of every rank.

Each rank has a signal pad that only it writes to. To signal a call, it writes one word there: the
call's number and a code of its description. If all pads hold the same word, all ranks make the same
call; no rank leaves its call before it has checked that. So no rank is more than one call ahead,
and two words in each pad, used alternately, are enough: a word is not overwritten before every rank
has read it, so that all ranks see a mismatch.

Each rank also has two buffers, which calls use alternately. It fills its buffer before it signals a
call. The other ranks may use the data from when all ranks have signalled that call until that rank
signals the next call but one. So data travel with the negotiation. Within a call, ranks can
exchange rows of small tables (`gather_row`) and wait for each other (`barrier`), if all do so.

A waiting rank sleeps on a gate: a futex that is changed by the last rank to write its word, so that
no rank is woken before it can go on. Without futexes it sleeps for short intervals.

Order of memory accesses: a word is written by one aligned store, so nothing has to be ordered
within a pad. A rank signals each call before it sends messages of it, and both gloo's sockets
and our channels order the sender's earlier writes before the receiver's later reads, on every
processor. `_fence`s are needed in three places. Between filling a buffer and writing its word, so
that all ranks that see the word see the data. Between writing a word and checking whether it was
the last one: of ranks that write at the same time, one sees all words. And between reading a gate's
number and the last check before sleeping, so that no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from collectives.errors import CollectiveTimeoutError, describe
from collectives.modes import inference_mode
from collectives.stall import Stall
from collectives.transport import futex

Table = npt.NDArray[np.float64]
# A cache line for each rank, so that ranks which write at once do not contend for one line.
_PAD_BYTES = 64
_PAD = _PAD_BYTES // 8
# The size of a buffer, and of a table's row: it holds, for example, the precise Gram matrices of
# 1,024 segments over 8 ranks. Only pages that are written to take memory.
BUFFER_BYTES = 256 * 1024 * 1024
TABLE_BYTES = 1024 * 1024
# A buffer keeps so much memory when a smaller call follows a larger one: enough for 25 MiB buckets.
_KEPT_BYTES = 32 * 1024 * 1024
_MADV_REMOVE = getattr(mmap, "MADV_REMOVE", 9)
# So many sizes and dtypes of buffers have their tensors kept, since making one costs microseconds.
_MAX_ENTRIES = 256
# The words of a pad. The first two are for calls, alternately; then the number of barriers that the
# rank has reached, and its processors: a hash of their numbers, and how many. Each word has a gate.
_BARRIERS, _CORES, _WORDS = 2, 3, 4
# A call's word: the code in the low bits, and above it the call's number from 1 to _NUMBERS. So a
# word is never 0, which stands for no call.
CODE_BITS = 56
_NUMBERS = 255
# The code of ranks that have joined: no description has this code.
JOINED = 0


def symmetric_memory_bytes(size: int) -> int:
    """Return the bytes of memory that `size` ranks share."""
    return _buffers_at(size) + 2 * size * (BUFFER_BYTES + TABLE_BYTES)


def _buffers_at(size: int) -> int:
    # Page-aligned, after the pads and one more line with the gates.
    return -(-(size + 1) * _PAD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


class RanksDiffer(Exception):
    """Another rank has signalled a different call."""


class _Peers(Protocol):
    """The part of `Transport`, which is above, that symmetric memory uses."""

    def gone(self) -> int | None: ...
    def why_gone(self, peer: int) -> str: ...
    def name(self, rank: int) -> int: ...
    def named(self, ranks: Iterable[int]) -> str: ...
    def abort(self, reason: str) -> None: ...


class SymmetricMemory:
    """One rank's view of the memory. All ranks signal every call of the group by `signal`.

    Args:
        memory: The shared memory, `symmetric_memory_bytes(size)` long, all zeros at first.
        rank: This rank.
        size: How many ranks share the memory.
        peers: The transport between them.
        cores: The numbers of the processors that this rank may run on. If the ranks outnumber
            their processors, a waiting rank sleeps at once instead of spinning first.
    """

    def __init__(
        self, memory: memoryview, rank: int, size: int, peers: _Peers, *, cores: Collection[int]
    ) -> None:
        words = memory.cast("B").cast("Q")[: (size + 1) * _PAD]
        self._mine = words[rank * _PAD : (rank + 1) * _PAD]
        self._words = [words[word : size * _PAD : _PAD] for word in range(_WORDS)]
        self._mine[_CORES] = zlib.crc32(repr(sorted(cores)).encode()) << 32 | len(cores)
        self._gates = words[size * _PAD :].cast("B").cast("I")
        # Tensors made in inference mode could not be written to outside of it.
        with inference_mode(False):
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=symmetric_memory_bytes(size))
        self._gates_at = whole.data_ptr() + size * _PAD_BYTES
        buffers, tables = whole[_buffers_at(size) :].split(
            [2 * size * BUFFER_BYTES, 2 * size * TABLE_BYTES]
        )
        self._buffers = buffers.view(2, size, BUFFER_BYTES)
        self._tables: Table = tables.view(torch.float64).view(2, size, -1).numpy()
        self._views: dict[tuple[int, int, torch.dtype], Sequence[torch.Tensor]] = {}
        self._used = [0, 0]
        self._workers = 0
        self._barriers = 0
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()
        self._peers = peers
        self._calls = 0
        self._word = 0
        self._settled = True
        self._needed = 0

    @property
    def workers(self) -> int:
        """How many ranks can run at the same time; equal on all ranks within a call.

        Exact if any two ranks share all of their processors or none; otherwise too high.
        """
        if not self._workers:
            words = self._words[_CORES].tolist()
            count = sum(word & 0xFFFFFFFF for word in {*words})
            if 0 in words:
                # A rank has not started yet, so the count is not kept.
                return count
            self._workers = count
        return self._workers

    def next_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's buffer for the next call; fill it before signalling that call."""
        number, nbytes = (self._calls + 1) % 2, numel * dtype.itemsize
        self._used[number] = max(self._used[number], nbytes)
        self._needed = nbytes
        return self.buffers(numel, dtype, ahead=1)[self.rank]

    def _release(self, number: int) -> None:
        """Free this rank's buffer beyond _KEPT_BYTES; no other rank may still read it."""
        first = (number * self.size + self.rank) * BUFFER_BYTES + _KEPT_BYTES
        start = self._buffers.data_ptr() + first
        if sys.platform == "linux":
            # A hint: if the system refuses it, the pages stay.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start),
                ctypes.c_size_t(self._used[number] - _KEPT_BYTES),
                _MADV_REMOVE,
            )
        self._used[number] = 0

    def buffers(self, numel: int, dtype: torch.dtype, ahead: int = 0) -> Sequence[torch.Tensor]:
        """Return all ranks' buffers of this call, by rank, to be used after `wait`.

        The caller must not write to elements that another rank uses. ahead: 1 for the next call's.
        """
        # Two buffers alternate: one rank may fill the next call's while others read this call's.
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
        """Signal the next call. code: its description's, in CODE_BITS bits and not 0; or JOINED."""
        self._calls += 1
        self._settled = False
        self._word = (self._calls % _NUMBERS + 1) << CODE_BITS | code
        self._post(self._calls % 2, self._word)
        try:
            settled = self.all_signalled()
        except RanksDiffer:
            settled = True
        if settled:
            self._open(self._calls % 2, self._calls)

    def withdraw(self) -> None:
        """Take back this call's signal, so that a late rank does not count this one as present.

        If all ranks are in the call already, the signal stays: ranks that check later must see it.
        Any thread may call this. This rank's own wait then ends with an error of its transport.
        """
        if not self._settled:
            self._mine[self._calls % 2] = 0

    def all_signalled(self) -> bool:
        """Whether all ranks have signalled this call; RanksDiffer if one has signalled another."""
        words = self._words[self._calls % 2].tolist()
        if words.count(self._word) == self.size:
            return True
        # Words with other numbers are not compared: those ranks have not signalled this call yet.
        number = self._word >> CODE_BITS
        for word in words:
            if word >> CODE_BITS == number and word != self._word:
                raise RanksDiffer
        return False

    def wait(self, step: str, timeout: float) -> None:
        """Wait until all ranks have signalled this call; RanksDiffer if one has signalled another.

        It raises CollectiveTimeoutError as `barrier` does.
        """
        if self.size > 1 and not self.all_signalled():
            word = self._calls % 2
            self._until(self.all_signalled, word, step, timeout)
        self._settled = True
        # Read the buffers only after the words that show that they are filled.
        self._fence()
        # All ranks have left the last call, so none still reads this rank's buffer of that call.
        before = (self._calls + 1) % 2
        if self._used[before] > max(_KEPT_BYTES, self._needed):
            self._release(before)
        self._needed = 0

    def gather_row(self, row: Table, step: str, timeout: float) -> Table:
        """Write this rank's row to a table, wait for all ranks to do so, and return the table.

        It has one row per rank, and must be read before this rank's next barrier.

        Args:
            row: float64, 1-D, at most TABLE_BYTES.
            step: As in `barrier`.
            timeout: In seconds, as in `barrier`.
        """
        # Two tables alternate: a slower rank may still be reading the last barrier's table.
        table = self._tables[(self._barriers + 1) % 2, :, : len(row)]
        table[self.rank] = row
        self.barrier(step, timeout)
        return table

    def barrier(self, step: str, timeout: float) -> None:
        """Wait until all ranks have called this equally often; then their earlier writes are seen.

        step: The name of the step in errors. A CollectiveTimeoutError names the ranks that have not
        called it within `timeout` seconds, or one that is gone.
        """
        self._barriers += 1
        self._post(_BARRIERS, self._barriers)
        if self._all_reached():
            self._open(_BARRIERS, self._barriers)
        else:
            self._until(self._all_reached, _BARRIERS, step, timeout)
        # Read the other ranks' writes before the barrier only after it.
        self._fence()

    def _all_reached(self) -> bool:
        """Whether all ranks have reached this barrier."""
        return min(self._words[_BARRIERS].tolist()) >= self._barriers

    def _open(self, word: int, number: int) -> None:
        """Wake the ranks that sleep on a word's gate. number: different each time."""
        if futex.available:
            self._gates[word] = number & 0xFFFFFFFF
            futex.wake(self._gates_at + 4 * word)

    def _sleep(self, there: Callable[[], bool], word: int, waited: float, left: float) -> None:
        """Sleep until the last rank has written its word, or for some time up to `left` seconds."""
        if not futex.available:
            futex.nap(waited)
            return
        number = self._gates[word]
        # If the last rank opens the gate after this, `futex.wait` sees another number and returns.
        # If it opened the gate before, `there` sees its word.
        self._fence()
        if not there():
            futex.wait(self._gates_at + 4 * word, number, min(futex.CHECK_SECONDS, left))

    def _until(self, there: Callable[[], bool], word: int, step: str, timeout: float) -> None:
        """Wait until `there()` is true; after any other end, abort, which tells the other ranks."""
        try:
            for _ in range(futex.SPINS if self.workers >= self.size else 0):
                if there():
                    return
                os.sched_yield()
            start, waited = time.monotonic(), 0.0
            stall: Stall | None = None
            while not there():
                # No rank leaves this step before all have reached it, so a rank that is gone never
                # will. The last rank may have reached it and left since `there()` was checked, so
                # check again. Not before the first sleep, since most waits sleep only once.
                gone = self._peers.gone() if waited else None
                if gone is not None and not there():
                    raise CollectiveTimeoutError(
                        f"{self._peers.named([self.rank])} got no answer from "
                        f"{self._peers.named([gone])} in {step}: {self._peers.why_gone(gone)}"
                    )
                if waited > timeout:
                    raise CollectiveTimeoutError(
                        f"{self._peers.named([self.rank])} got no answer from {self._late(word)} "
                        f"in {step} within {timeout:.3g} s"
                    )
                if waited > futex.CHECK_SECONDS:
                    me = self._peers.name(self.rank)
                    stall = stall or Stall(me, step, timeout, lambda: self._late(word))
                    stall.check()
                self._sleep(there, word, waited, timeout - waited)
                waited = time.monotonic() - start
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
        """Write this rank's word between two fences, which share the use of the lock in the middle.

        A rank that sees the word also sees this rank's earlier writes. This rank's later reads
        follow the write of the word, so at least one of the last two ranks sees all words.
        """
        with self._lock:
            pass
        with self._lock:
            self._mine[word] = value
        with self._lock:
            pass

    def _fence(self) -> None:
        """Keep the processor from moving memory accesses across this.

        Accesses before a release of the lock stay before it; accesses after an acquisition stay
        after it. The second acquisition follows the first release. Python has no other fence.
        """
        with self._lock:
            pass
        with self._lock:
            pass
