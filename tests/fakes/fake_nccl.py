"""A stand-in for `cupy.cuda.nccl` over the pretended GPU of fake_cuda.py; ranks are threads.

What it is good for: it keeps NCCL's rules more strictly than NCCL does, so a transport that breaks
one fails a test instead of hanging now and then. A communicator serves one thread at a time; sends
and receives must be grouped, and meet by order and byte count; every blocking call (start, split,
destroy, abort) waits for all ranks, without a limit; collecting a communicator that is alive is an
error.

What it cannot show: that NCCL does as modelled here, speed, anything about memory on a GPU. The
names, arguments and error codes are those of cupy 14.2 (test_cupy_backend.py compares them where
cupy is installed).
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from tests.fakes.fake_cuda import Broken, FakeGraph, FakeStream

_TICK = 1e-3
_TEXTS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_Op = Callable[[], None]


class NcclError(RuntimeError):
    """As cupy's: a KeyError comes out for the codes that cupy has no text for."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_TEXTS[status])


class _Clique:
    """What the communicators made together share."""

    def __init__(self, size: int, module: FakeNccl) -> None:
        self.size = size
        self.module = module
        self.changed = threading.Condition()
        self.arrived: dict[str, dict[int, Any]] = defaultdict(dict)
        self.letters: dict[tuple[int, int], list[_Letter]] = {}
        self.errors: dict[int, int] = {}

    def meet(self, what: str, rank: int, word: Any, give_up: Callable[[], bool]) -> dict[int, Any]:
        """All ranks' words, once all have come; raises GaveUp when this one must not wait on."""
        with self.changed:
            words = self.arrived[what]
            words[rank] = word
            self.changed.notify_all()
            token = object()
            self.module.waiting.add(token)
            try:
                while len(words) < self.size:
                    if give_up() or self.module.over:
                        raise GaveUp
                    self.changed.wait(_TICK)
            finally:
                self.module.waiting.remove(token)
            return words


class GaveUp(Exception):
    """A blocking call ended without the other ranks."""


class _Letter:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.taken = False


class FakeNccl:
    """The module `cupy.cuda.nccl`. Tests set the attributes below before they break something."""

    NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 1, 2, 4
    NCCL_INT8, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 0, 6, 7, 8, 9
    NCCL_SUM = 0
    NcclError = NcclError
    available = True

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.over = False
        self.waiting: set[object] = set()  # one for each call that waits for other ranks
        self.fail_send: dict[int, int] = {}  # rank -> status of its next send
        self.silent_in_group_end: set[int] = set()  # ranks whose groupEnd waits for an abort
        self.aborted: set[int] = set()
        self.destroyed: list[int] = []
        self.cliques: dict[bytes, _Clique] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self.depths: dict[int, int] = defaultdict(int)
        module = self

        class NcclCommunicator(_Communicator):
            nccl = module

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        return next(self._ids).to_bytes(4, "little") * 32

    def clique(self, unique_id: bytes, size: int) -> _Clique:
        with self._lock:
            return self.cliques.setdefault(unique_id, _Clique(size, self))

    @property
    def group(self) -> list[tuple[_Communicator, FakeStream, str, _Op]] | None:
        """The calling thread's open group."""
        return getattr(self._thread, "group", None)

    def groupStart(self) -> None:
        if self.group is not None:
            self.complain("a group was started inside a group")
        self.depths[threading.get_ident()] += 1
        self._thread.group = []
        self._thread.failed = 0

    def groupEnd(self) -> None:
        group = self.group
        if group is None:
            raise NcclError(5)
        self.depths[threading.get_ident()] -= 1
        self._thread.group = None
        used = {id(c): c for c, *_ in group}.values()
        try:
            if self._thread.failed:
                raise NcclError(self._thread.failed)
            for communicator in used:
                while communicator.rank in self.silent_in_group_end and not communicator.ended:
                    time.sleep(_TICK)
                if communicator.ended:
                    raise NcclError(6)
        finally:
            for communicator in used:
                communicator.user = None
        for communicator, stream, *_ in group:
            if stream.capture is not None:
                communicator.hold(stream.capture)
        for stream in {id(s): s for _, s, _, _ in group}.values():
            lines: dict[str, list[_Op]] = defaultdict(list)
            for _, other, line, op in group:
                if other is stream:
                    lines[line].append(op)
            stream.put(lambda lines=lines: _run_together(list(lines.values())))

    def fail_group(self, status: int) -> None:
        self._thread.failed = status

    def complain(self, text: str) -> None:
        self.broken.append(text)
        raise Broken(text)

    def end(self) -> None:
        """Release every thread that still waits; no rule was broken, no group is open."""
        self.over = True
        if self.waiting:
            while self.waiting:
                time.sleep(_TICK)
            # Now what nothing but these calls kept is collected, which breaks a rule.
            time.sleep(20 * _TICK)
            gc.collect()
        assert self.broken == []
        assert not any(self.depths.values()), "a group was never ended"


def _run_together(lines: list[list[_Op]]) -> None:
    """Messages of one line run in order, the lines make progress independently of each other."""

    def run(line: list[_Op]) -> None:
        for op in line:
            op()

    threads = [threading.Thread(target=run, args=(line,), daemon=True) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Communicator:
    nccl: FakeNccl

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise TypeError("Argument 'commId' has incorrect type (expected bytes)")
        self._start(self.nccl.clique(commId, ndev), rank)

    def _start(self, clique: _Clique, rank: int) -> None:
        self.rank = rank
        self.ended = False
        self.calls = 0
        self.splits = 0
        self._clique = clique
        # The thread that uses it now.
        self.user: int | None = None
        clique.meet("start", rank, None, lambda: False)
        self.freed = False
        self.graphs: set[FakeGraph] = set()

    def hold(self, graph: FakeGraph) -> None:
        """Live as long as a graph that was captured with this communicator."""
        if graph not in self.graphs:
            self.graphs.add(graph)
            graph.freed.append(lambda: self.graphs.discard(graph))

    def _check_graphs(self) -> None:
        if self.graphs:
            self.nccl.complain("a communicator that graphs hold would wait for their end for ever")

    def __del__(self) -> None:
        if not getattr(self, "freed", True):
            self.nccl.broken.append(f"rank {self.rank}'s communicator was collected alive")

    def _enter(self) -> None:
        if self.user not in (None, threading.get_ident()):
            self.nccl.complain("a communicator was used from two threads at once")
        if self.ended:
            self.nccl.complain("a communicator was used after its end")

    def _grouped(self, stream: int, line: str, op: _Op) -> None:
        self._enter()
        group = self.nccl.group
        if group is None:
            self.nccl.complain("a message outside a group")
        else:
            self.user = threading.get_ident()
            group.append((self, FakeStream.by_handle[stream], f"{id(self)} {line}", op))

    def _waits(self) -> bool:
        return not (self.ended or self._clique.errors or self.nccl.over)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        if status := self.nccl.fail_send.pop(self.rank, 0):
            self.nccl.fail_group(status)
            raise NcclError(status)
        if datatype != self.nccl.NCCL_UINT8 or not 0 <= peer < self._clique.size or count < 1:
            raise NcclError(4)
        # Not a defaultdict, which may make two lists where sender and receiver ask at once.
        letters = self._clique.letters.setdefault((self.rank, peer), [])

        def op() -> None:
            letter = _Letter(ctypes.string_at(sendbuf, count))
            letters.append(letter)
            while not letter.taken and self._waits():
                time.sleep(_TICK)

        self._grouped(stream, f"to {peer}", op)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        if datatype != self.nccl.NCCL_UINT8 or not 0 <= peer < self._clique.size or count < 1:
            raise NcclError(4)
        letters = self._clique.letters.setdefault((peer, self.rank), [])

        def op() -> None:
            while not letters and self._waits():
                time.sleep(_TICK)
            if not letters:
                return
            letter = letters.pop(0)
            if len(letter.data) != count:
                self.nccl.broken.append(f"{len(letter.data)} bytes sent, {count} expected")
            ctypes.memmove(recvbuf, letter.data, min(count, len(letter.data)))
            letter.taken = True

        self._grouped(stream, f"from {peer}", op)

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        kind = {0: torch.int8, 1: torch.uint8, 2: torch.int32, 4: torch.int64}.get(datatype) or {
            6: torch.float16,
            7: torch.float32,
            8: torch.float64,
            9: torch.bfloat16,
        }[datatype]

        def run() -> None:
            # Counted when it runs, which is more than once in a graph.
            self.calls += 1
            what = f"allReduce {self.calls}"
            mine = bytearray(ctypes.string_at(sendbuf, count * kind.itemsize))
            try:
                every = self._clique.meet(what, self.rank, mine, lambda: not self._waits())
            except GaveUp:
                return
            total = torch.zeros(count, dtype=kind)
            for rank in range(self._clique.size):
                total += torch.frombuffer(every[rank], dtype=kind)
            ctypes.memmove(recvbuf, total.data_ptr(), count * kind.itemsize)

        self._grouped(stream, "all", run)

    def check_async_error(self) -> None:
        if self.ended:
            self.nccl.complain("an ended communicator was asked for errors")
        if self.rank in self._clique.errors:
            raise NcclError(self._clique.errors[self.rank])

    def destroy(self) -> None:
        self._check_graphs()
        if self.user is not None:
            self.nccl.complain("a communicator was destroyed while another thread used it")
        with suppress(GaveUp):
            self._clique.meet("destroy", self.rank, None, lambda: False)
            self.freed = True
        self.ended = True
        self.nccl.destroyed.append(self.rank)

    def abort(self) -> None:
        self._check_graphs()
        self.ended = True
        self.nccl.aborted.add(self.rank)
        with suppress(GaveUp):
            self._clique.meet("abort", self.rank, None, lambda: False)
            self.freed = True

    def commSplit(self, color: int, key: int, config: Any = None) -> _Communicator:
        self._enter()
        self.splits += 1
        mine, what = (color, key), f"split {self.splits}"
        words = self._clique.meet(what, self.rank, mine, lambda: self.ended)
        members = sorted((k, rank) for rank, (c, k) in words.items() if c == color)
        name = f"{id(self._clique)} {self.splits} {color}".encode().ljust(128)
        made = type(self).__new__(type(self))
        made._start(self.nccl.clique(name, len(members)), [r for _, r in members].index(self.rank))
        return made
