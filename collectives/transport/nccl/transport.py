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
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.communicators import (
    DTYPES,
    CallingThread,
    Communicators,
    load_nccl,
    translate_errors,
)
from collectives.transport.nccl.pending import Pending, Posted
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory


class NcclTransport(Transport):
    """Point-to-point messages of CUDA tensors on one device a rank; CPU tensors go to `host`.

    Making one is a collective of all ranks of `host`.

    `exchange` puts messages on the communication stream, the caller's stream behind them, and
    returns. A step that is late, a peer that is gone and what NCCL reports are noticed beside the
    host's thread (pending.py), and raised by `check_streams` and by the next exchange. What is
    captured in a CUDA graph is not watched: capture on all ranks alike, after a first run outside
    (NCCL connects ranks at their first message). Transports that share a thread work one after the
    other; of torch's communicators on the device see docs/groups.md.

    Args:
        host: Carries CPU tensors between the same ranks.
        store: Through which rank 0's NCCL id reaches the others.
        device: This rank's GPU, the current one unless given.
        timeout: Seconds that making it may take.
        thread: What calls NCCL, with others of the same device; one of its own unless given.

    Raises:
        ImportError: Something has to be installed; says what.
        RuntimeError: torch sees no GPU.
        ValueError: The device is not CUDA's.
        CollectiveTimeoutError: A rank does not come.
        TransportError: NCCL fails.
    """

    device: torch.device
    sums_on_gpu = True

    def __init__(
        self,
        host: Transport,
        store: dist.Store,
        device: torch.device | None = None,
        *,
        timeout: float,
        thread: CallingThread | None = None,
    ) -> None:
        nccl = load_nccl()
        self.device = device or torch.device("cuda", cuda.current_device())
        if self.device.type != "cuda" or self.device.index is None:
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {self.device}')
        self.rank = host.rank
        self.size = host.size
        self.names = host.names
        self.process_group = host.process_group
        self._nccl = nccl
        self._host = host
        # Each rank counts for itself, and all make their communicators in one order.
        count = store.add(f"adasum/nccl/made-by-{self.rank}", 1)
        self._store = dist.PrefixStore(f"adasum/nccl/{count}", store)
        self._closed = False
        self._parts: dict[tuple[int, ...], Any] = {}
        thread = thread or CallingThread(self.device, f"nccl-{self.rank}")
        self._stream = thread.stream
        self._communicators = made = Communicators(nccl, thread)

        def check(step: str) -> None:
            with translate_errors(nccl, step):
                made.check()

        self._pending = Pending(self.rank, made.abort, host.gone, check, host.names)
        made.watch(self._pending)
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

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        if not _on_gpu(sends, recvs):
            self._host.exchange(sends, recvs, step, timeout)
            return
        self.post(sends, recvs, step, timeout)()

    def posts_ahead(self, device: torch.device) -> bool:
        """Only messages between GPUs: those of the host are not under way by themselves."""
        return device.type == "cuda"

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

    def check_streams(self) -> None:
        """Raise what ended messages and sums under way, over NCCL or torch's."""
        self._pending.raise_error()
        self._host.check_streams()

    def follow(
        self,
        works: Sequence[dist.Work],
        process_group: dist.ProcessGroup,
        device: torch.device,
        step: str,
        timeout: float,
    ) -> None:
        """Watch works of torch's NCCL: `Transport.follow`."""
        self._host.follow(works, process_group, device, step, timeout)

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a rank whose end is closed, as the host's transport knows it."""
        return self._host.gone(peers)

    def why_gone(self, peer: int) -> str:
        """Say why the end of a rank that is gone was closed."""
        return self._host.why_gone(peer)

    def split(self, ranks: Sequence[int], timeout: float) -> NcclTransport:
        """Return a transport with communicators of its own on the same device.

        Both call NCCL from one thread, for one stream, so that their work is under way one after
        the other. So all ranks have to start it in one order.
        """
        store = dist.PrefixStore(f"ranks {tuple(ranks)}", self._store)
        host = self._host.split(ranks, timeout)
        thread = self._communicators.thread
        return NcclTransport(host, store, self.device, timeout=timeout, thread=thread)

    def interrupt(self, reason: str) -> None:
        """End what is under way on the GPU, and let the host's waits raise."""
        self._host.interrupt(reason)
        self._pending.abort(lambda how: TransportError(f"{reason} ({how})"))

    def abort(self, reason: str) -> None:
        """End the communicators, with what is under way, and tell the peers why over `host`."""
        with ExitStack() as stack:
            stack.callback(self._pending.abort, lambda how: TransportError(reason))
            self._host.abort(reason)

    def close(self) -> None:
        """Wait for what is under way, destroy the communicators and close `host`.

        In bounded time also when ranks are gone. Raises what ended messages under way where nobody
        was told before; all is closed by then.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._host.close)
            stack.callback(self._close)
            self._pending.finish()

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
            event = cuda.Event()
            caller = cuda.current_stream(self.device)
            capturing = cuda.is_current_stream_capturing()
            self._stream.wait_event(caller.record_event())
            if not capturing:
                # In a graph the order of the streams alone keeps memory from being used again.
                for tensor in tensors:
                    tensor.record_stream(self._stream)
            group = self._communicators.group
            self._bounded(lambda: group(post, timeout), peers, step, timeout)
            event.record(self._stream)
        if not capturing:
            self._pending.add(Posted(event, peers, step, timeout, start))

        def wait() -> None:
            with cuda.device(self.device):
                caller.wait_event(event)

        return wait

    def _bounded(
        self, job: Callable[[], Any], peers: tuple[int, ...], step: str, timeout: float
    ) -> Any:
        """Return what `job` returns; any failure of NCCL's ends the communicators."""
        try:
            with translate_errors(self._nccl, step):
                return job()
        except futures.TimeoutError:
            self._pending.late(peers, step, timeout)
        except TransportError as error:
            failure: CollectiveError = error
            self._pending.fail(lambda how: failure)
        # What was found first: this may have failed because that has ended all.
        raise self._pending.failure()

    def _check_usable(self, step: str) -> None:
        if self._closed:
            raise TransportError(f"{step}: this NCCL transport was closed")
        self._pending.check_usable(step)

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
            self._pending.late((0,), step, timeout)
            raise self._pending.failure() from None
        unique_id = self._store.get("all")
        left = max(deadline - time.monotonic(), 0.1)
        return self._with_all(lambda: self._communicators.make(join, left), step, timeout)

    def _with_all(self, job: Callable[[], Any], step: str, timeout: float) -> Any:
        """Return what a job returns in which all ranks take part, on the host alone."""
        others = tuple(r for r in range(self.size) if r != self.rank)
        return self._bounded(job, others, step, timeout)


def _on_gpu(sends: Messages, recvs: Messages) -> bool:
    return any(message.tensor.device.type != "cpu" for message in (*sends, *recvs))
