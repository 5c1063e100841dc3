"""Messages between GPUs through NCCL, called with `cupy.cuda.nccl`.

All of a step's messages are one NCCL group of sends and receives of bytes, so every dtype travels,
on a communication stream of its own that is ordered by events behind and before the caller's
stream. One thread calls NCCL (communicators.py).

Not yet run on a GPU: shown over a strict stand-in for NCCL alone (tests/fakes/fake_nccl.py).
tests/processes/test_nccl.py is for where there is one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.communicators import (
    DTYPES,
    Communicators,
    load_nccl,
    translate_errors,
)
from collectives.transport.nccl.pending import Posted, arrives
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory


class NcclTransport(Transport):
    """Point-to-point messages of CUDA tensors on one device a rank; CPU tensors go to `host`.

    Making one is a collective of all ranks of `host`.

    `exchange` waits on the host for its messages, so that a timeout is an error of the step that
    caused it. Within `deferred()` steps are only put on the streams and are waited for at the end.
    While the caller's stream is captured in a CUDA graph nothing waits at all: capture on all ranks
    alike, after a first run outside (NCCL connects ranks at their first message). As NCCL demands,
    let no other communicator of the device be busy in another thread meanwhile.

    Args:
        host: Carries CPU tensors between the same ranks.
        store: Through which rank 0's NCCL id reaches the others.
        device: This rank's GPU, the current one unless given.
        timeout: Seconds that making it may take.

    Raises:
        ImportError: Something has to be installed; says what.
        RuntimeError: torch sees no GPU.
        ValueError: The device is not CUDA's.
        CollectiveTimeoutError: A rank does not come.
        TransportError: NCCL fails.
    """

    device: torch.device
    posts_ahead = True
    sums_on_gpu = True

    def __init__(
        self,
        host: Transport,
        store: dist.Store,
        device: torch.device | None = None,
        *,
        timeout: float,
    ) -> None:
        nccl = load_nccl()
        self.device = device or torch.device("cuda", cuda.current_device())
        if self.device.type != "cuda" or self.device.index is None:
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {self.device}')
        self.rank = host.rank
        self.size = host.size
        self.process_group = host.process_group
        self.carries_codes = host.carries_codes
        self._nccl = nccl
        self._host = host
        # Each rank counts for itself, and all make their communicators in one order.
        count = store.add(f"adasum/nccl/made-by-{self.rank}", 1)
        self._store = dist.PrefixStore(f"adasum/nccl/{count}", store)
        self._failure: BaseException | None = None
        self._parts: dict[tuple[int, ...], Any] = {}
        self._stream = cuda.Stream(self.device)
        self._communicators = Communicators(nccl, self.device, f"nccl-{self.rank}")
        self._pending = self._communicators.pending
        # Runs at the latest when the interpreter exits.
        self._close = weakref.finalize(self, self._communicators.close)
        self._whole = self._join(timeout)

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """The host's."""
        return self._host.symmetric_memory

    def __repr__(self) -> str:
        return f"NcclTransport(CPU tensors: {self._host!r})"

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError for a GPU other than this rank's."""
        if device.type == "cpu":
            self._host.check_device(device)
        elif device.type != "cuda":
            raise ValueError(f"tensor is on {device}, NCCL carries CUDA tensors: move it there")
        elif device != self.device:
            raise ValueError(
                f"tensor is on {device}, this rank's NCCL communicator is on {self.device}: move "
                f"the tensor there, or call torch.cuda.set_device({device.index}) before init"
            )

    def exchange(
        self, sends: Messages, recvs: Messages, step: str, timeout: float, code: int = 0
    ) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        if not _on_gpu(sends, recvs):
            self._host.exchange(sends, recvs, step, timeout, code)
            return
        self.post(sends, recvs, step, timeout)()

    def flush(self, step: str, timeout: float) -> None:
        """Flush the messages of CPU tensors."""
        self._host.flush(step, timeout)

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Put the messages on the communication stream, in order with those posted before.

        Returns:
            What has to be called before the messages are used: what the caller's stream is given
            in the meantime runs beside them. CPU tensors have arrived already.
        """
        sends = [message for message in sends if message.tensor.numel()]
        recvs = [message for message in recvs if message.tensor.numel()]
        if not _on_gpu(sends, recvs):
            return super().post(sends, recvs, step, timeout)
        stream = self._stream.cuda_stream
        kind = self._nccl.NCCL_UINT8

        def post() -> None:
            for messages, call in ((sends, self._whole.send), (recvs, self._whole.recv)):
                for peer, tensor in messages:
                    nbytes = tensor.numel() * tensor.element_size()
                    call(tensor.data_ptr(), nbytes, kind, peer, stream)

        peers = tuple(sorted({message.peer for message in (*sends, *recvs)}))
        tensors = [message.tensor for message in (*sends, *recvs)]
        return self._start(post, tensors, peers, step, timeout)

    def all_reduce(
        self, flat: torch.Tensor, ranks: tuple[int, ...] | None, step: str, timeout: float
    ) -> None:
        """Sum a contiguous CUDA tensor in place by NCCL's own all-reduce: `Transport.all_reduce`.

        Every rank of the transport calls it with the part it belongs to, and a part is new on all
        of them or on none: the first call splits the communicator.
        """
        values = torch.view_as_real(flat) if flat.is_complex() else flat
        if values.dtype not in DTYPES:
            raise TypeError(f"NCCL cannot add {flat.dtype}: use another algorithm, or convert")
        self.check_device(flat.device)
        part = self._part(ranks, step, timeout)
        peers = tuple(r for r in (range(self.size) if ranks is None else ranks) if r != self.rank)
        if not flat.numel() or not peers:
            return
        stream = self._stream.cuda_stream
        kind = getattr(self._nccl, DTYPES[values.dtype])

        def post() -> None:
            address = values.data_ptr()
            part.allReduce(address, address, values.numel(), kind, self._nccl.NCCL_SUM, stream)

        self._start(post, [flat], peers, step, timeout)()

    def deferred(self) -> AbstractContextManager[None]:
        """Put off waiting within; leaving waits for all steps, each up to its timeout.

        No more than 64 are under way at once. One that is late while the host is blocked inside
        CUDA is noticed all the same, and ends the communicators. What a step received may be used
        on the caller's stream at once, as without this.
        """
        return self._pending.deferred(self._await)

    def split(self, ranks: Sequence[int], timeout: float) -> NcclTransport:
        """Return a transport with communicators of its own on the same device.

        As NCCL demands, work on the two must not be under way at once, unless all ranks start it
        in one order.
        """
        store = dist.PrefixStore(f"ranks {tuple(ranks)}", self._store)
        return NcclTransport(self._host.split(ranks, timeout), store, self.device, timeout=timeout)

    def abort(self, reason: str) -> None:
        """End the communicators, with what is under way, and tell the peers why over `host`."""
        self._failure = self._failure or TransportError(reason)
        with ExitStack() as stack:
            stack.callback(self._end)
            self._host.abort(reason)

    def close(self) -> None:
        """Destroy the communicators, in bounded time also when ranks are gone; close `host`."""
        self._failure = self._failure or TransportError("it was closed")
        with ExitStack() as stack:
            stack.callback(self._host.close)
            self._close()

    def _start(
        self,
        post: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        peers: tuple[int, ...],
        step: str,
        timeout: float,
    ) -> Callable[[], None]:
        """Put one group on the communication stream, behind the caller's work so far.

        Returns what puts the caller's later work behind it.
        """
        self._check_usable(step)
        start = time.monotonic()
        with cuda.device(self.device):
            posted = Posted(cuda.Event(), peers, step, timeout)
            caller = cuda.current_stream(self.device)
            capturing = cuda.is_current_stream_capturing()
            self._stream.wait_event(caller.record_event())
            if not capturing:
                # In a graph the order of the streams alone keeps memory from being used again.
                for tensor in tensors:
                    tensor.record_stream(self._stream)
            self._bounded(lambda: self._communicators.group(post, timeout), posted)
            posted.event.record(self._stream)
        deferred = self._pending.deferring
        if deferred and not capturing:
            self._pending.put_off(posted, self._await)

        def wait() -> None:
            with cuda.device(self.device):
                caller.wait_event(posted.event)
            if not deferred and not capturing:
                self._await(posted, start)

        return wait

    def _await(self, posted: Posted, start: float) -> None:
        """Wait on the host, its timeout from `start`, watching for NCCL's errors."""

        def check() -> None:
            self._bounded(self._communicators.check, posted)
            self._check_late()

        if not arrives(posted, start, check):
            self._fail(self._too_slow(posted))

    def _bounded(self, job: Callable[[], Any], posted: Posted) -> Any:
        """Return what `job` returns; any failure of NCCL's ends the communicators."""
        try:
            with translate_errors(self._nccl, posted.step):
                return job()
        except futures.TimeoutError:
            self._fail(self._too_slow(posted))
        except TransportError as error:
            self._check_late()
            self._fail(error)

    def _fail(self, error: CollectiveError) -> NoReturn:
        self._failure = error
        self._end()
        raise error

    def _end(self) -> None:
        self._pending.items.clear()
        self._communicators.abort()

    def _too_slow(self, posted: Posted) -> CollectiveTimeoutError:
        peers = posted.peers
        names = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {peers}"
        return CollectiveTimeoutError(
            f"rank {self.rank} got no answer from {names} in {posted.step} (stopped after "
            f"{posted.timeout:g} s; its NCCL communicator was aborted)"
        )

    def _check_late(self) -> None:
        """Raise what NCCL's thread found while this one was blocked in CUDA."""
        late = self._pending.late
        if late is not None and self._failure is None:
            self._fail(self._too_slow(late))

    def _check_usable(self, step: str) -> None:
        self._check_late()
        if self._failure is not None:
            raise TransportError(
                f"{step}: this NCCL transport is unusable since {self._failure}"
            ) from self._failure

    def _part(self, ranks: tuple[int, ...] | None, step: str, timeout: float) -> Any:
        """Return the communicator of some ranks, split from the whole one at its first use."""
        if ranks is None or len(ranks) == self.size:
            return self._whole
        if ranks not in self._parts:
            if self.rank not in ranks or list(ranks) != sorted({*ranks}):
                raise ValueError(f"ranks must be ascending and hold {self.rank}, got {ranks}")
            self._check_usable(step)
            position = ranks.index(self.rank)

            def split() -> Any:
                return self._whole.commSplit(ranks[0], position)

            self._parts[ranks] = self._with_all(
                lambda: self._communicators.make(split, timeout), step, timeout
            )
        return self._parts[ranks]

    def _join(self, timeout: float) -> Any:
        """Make the communicator of all ranks; its id goes by the store."""
        deadline, step = time.monotonic() + timeout, "start-up"

        def make_id() -> Any:
            return self._communicators.call(self._nccl.get_unique_id, timeout)

        def join() -> Any:
            return self._nccl.NcclCommunicator(self.size, unique_id, self.rank)

        if self.rank == 0:
            self._store.set("all", self._with_all(make_id, step, timeout))
        try:
            self._store.wait(["all"], timedelta(seconds=timeout))
        except RuntimeError:
            self._fail(self._too_slow(Posted(cuda.Event(), (0,), step, timeout)))
        unique_id = self._store.get("all")
        left = max(deadline - time.monotonic(), 0.1)
        return self._with_all(lambda: self._communicators.make(join, left), step, timeout)

    def _with_all(self, job: Callable[[], Any], step: str, timeout: float) -> Any:
        """Return what a job returns in which all ranks take part, on the host alone."""
        others = tuple(r for r in range(self.size) if r != self.rank)
        return self._bounded(job, Posted(cuda.Event(), others, step, timeout))


def _on_gpu(sends: Messages, recvs: Messages) -> bool:
    return any(message.tensor.device.type != "cpu" for message in (*sends, *recvs))
