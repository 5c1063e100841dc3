"""Messages of CUDA tensors over NCCL, through cupy or through torch.distributed.

All of a step's messages are one NCCL group of sends and receives of bytes, so every dtype travels,
on a communication stream that is ordered by events behind and before the caller's stream.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import TransportError
from collectives.transport.base import Messages, Transport
from collectives.transport.nccl.backend import Backend, translate_errors
from collectives.transport.nccl.cupy_backend import DTYPES
from collectives.transport.nccl.watcher import Posted, Watcher
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory


class NcclTransport(Transport):
    """Point-to-point messages of CUDA tensors; CPU tensors go to `host`.

    Making one is a collective of all ranks of `host` where the back end is bound to a GPU.

    `exchange` puts messages on the communication stream, the caller's stream behind them, and
    returns. A step that is late, a peer that is gone and what NCCL reports are noticed beside the
    host's thread (watcher.py), and raised by `check_streams` and by the next exchange. What is
    captured in a CUDA graph is not watched: capture on all ranks alike, after a first run outside
    (NCCL connects ranks at their first message). Of torch's communicators beside ours on the device
    see docs/groups.md.

    Args:
        host: Carries CPU tensors between the same ranks.
        backend: What calls NCCL.
        timeout: Seconds that making it may take.

    Raises:
        CollectiveTimeoutError: A rank does not come.
        TransportError: NCCL fails.
    """

    def __init__(self, host: Transport, backend: Backend, *, timeout: float) -> None:
        self.rank = host.rank
        self.size = host.size
        self.names = host.names
        self.process_group = host.process_group
        self.device = backend.device
        self.sums_on_gpu = backend.sums
        self._host = host
        self._backend = backend
        self._opened: set[torch.device] = set()
        self._closed = False
        self._watcher = Watcher(host, backend)
        # Runs at the latest when the interpreter exits.
        self._end = weakref.finalize(self, _end, self._watcher, backend)
        if self.device is not None:
            self._open(self.device, "start-up", timeout)

    @property
    def symmetric_memory(self) -> SymmetricMemory | None:
        """The host's."""
        return self._host.symmetric_memory

    def __repr__(self) -> str:
        return f"NcclTransport(CPU tensors: {self._host!r})"

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError for a GPU other than this rank's, where the back end is bound to one."""
        if device.type == "cpu":
            self._host.check_device(device)
        elif device.type != "cuda":
            raise ValueError(f"tensor is on {device}, NCCL carries CUDA tensors: move it there")
        elif self.device not in (None, device):
            raise ValueError(
                f"tensor is on {device}, this rank's NCCL communicator is on {self.device}: move "
                f"the tensor there, or call torch.cuda.set_device({device.index}) before init"
            )

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        if _device_of(sends, recvs) is None:
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
        device = _device_of(sends, recvs)
        if device is None:
            return super().post(sends, recvs, step, timeout)
        self._open(device, step, timeout)
        sends = [message for message in sends if message.tensor.numel()]
        recvs = [message for message in recvs if message.tensor.numel()]
        both = [*sends, *recvs]
        if not both:
            return lambda: None
        return self._start(
            lambda stream: self._backend.exchange(sends, recvs, stream, timeout),
            [message.tensor for message in both],
            device,
            tuple(sorted({message.peer for message in both})),
            step,
            timeout,
        )

    def all_reduce(
        self,
        flat: torch.Tensor,
        among: tuple[int, ...] | dist.ProcessGroup | None,
        step: str,
        timeout: float,
    ) -> None:
        """Sum a contiguous CUDA tensor in place by NCCL's sum: `Transport.all_reduce`."""
        by_torch = not (among is None or isinstance(among, tuple))
        if by_torch is self.sums_on_gpu:
            self._host.all_reduce(flat, among, step, timeout)
            return
        values = torch.view_as_real(flat) if flat.is_complex() else flat
        if values.dtype not in DTYPES:
            raise TypeError(f"NCCL cannot add {flat.dtype}: use another algorithm, or convert")
        self.check_device(flat.device)
        ranks = among if isinstance(among, tuple) else () if by_torch else range(self.size)
        self._start(
            lambda stream: self._backend.all_reduce(values, among, stream, timeout),
            [flat],
            flat.device,
            tuple(rank for rank in ranks if rank != self.rank),
            step,
            timeout,
        )()

    def check_streams(self) -> None:
        """Raise what ended messages and sums under way, over NCCL or torch's."""
        self._watcher.raise_error()
        self._host.check_streams()

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a rank whose end is closed, as the host's transport knows it."""
        return self._host.gone(peers)

    def why_gone(self, peer: int) -> str:
        """Say why the end of a rank that is gone was closed."""
        return self._host.why_gone(peer)

    def split(self, ranks: Sequence[int], timeout: float) -> NcclTransport:
        """Return a transport with communicators of its own: `Backend.split`."""
        host = self._host.split(ranks, timeout)
        with ExitStack() as failed:
            # What it has opened, a listener among it, would else live as long as the error.
            failed.callback(host.close)
            part = NcclTransport(host, self._backend.split(host, tuple(ranks)), timeout=timeout)
            failed.pop_all()
        return part

    def interrupt(self, reason: str) -> None:
        """End what is under way on the GPU, and let the host's waits raise."""
        self._host.interrupt(reason)
        self._abort(reason)

    def abort(self, reason: str) -> None:
        """End what is under way, and the communicators; tell the peers why over `host`."""
        with ExitStack() as stack:
            stack.callback(self._abort, reason)
            self._host.abort(reason)

    def close(self) -> None:
        """Wait for what is under way, let go of the communicators and close `host`.

        In bounded time also when ranks are gone. Raises what ended messages under way unless that
        was raised before; all is closed by then.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._host.close)
            stack.callback(self._end)
            self._watcher.finish()

    def _abort(self, reason: str) -> None:
        # CUDA itself may have failed: the error that brought this about is the one to raise.
        with suppress(RuntimeError):
            if not (self._backend.shared and self._watcher.is_idle()):
                self._watcher.abort(reason)

    def _start(
        self,
        call: Callable[[cuda.Stream], None],
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        peers: tuple[int, ...],
        step: str,
        timeout: float,
    ) -> Callable[[], None]:
        """Put one group on the communication stream, behind the caller's work so far.

        Returns what puts the caller's later work behind it.
        """
        start = time.monotonic()
        stream = self._backend.stream(device)
        with cuda.device(device):
            caller = cuda.current_stream(device)
            capturing = cuda.is_current_stream_capturing()
            stream.wait_event(caller.record_event())
            if not capturing:
                # In a graph the order of the streams alone keeps memory from being used again.
                for tensor in tensors:
                    tensor.record_stream(stream)
            self._bounded(lambda: call(stream), peers, step, timeout)
            event = stream.record_event()
        if not capturing:
            self._watcher.add(Posted(event, peers, step, timeout, start))

        def wait() -> None:
            with cuda.device(device):
                caller.wait_event(event)

        return wait

    def _open(self, device: torch.device, step: str, timeout: float) -> None:
        """Let all ranks make their communicators at the first use of a GPU."""
        if device in self._opened or cuda.is_current_stream_capturing():
            return
        self._with_all(lambda: self._backend.open(self._host, device, timeout), step, timeout)
        self._opened.add(device)

    def _with_all(self, job: Callable[[], Any], step: str, timeout: float) -> Any:
        """Return what a job returns in which all ranks take part, on the host alone."""
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        return self._bounded(job, others, step, timeout)

    def _bounded(
        self, job: Callable[[], Any], peers: tuple[int, ...], step: str, timeout: float
    ) -> Any:
        """Return what `job` returns; a failure ends the communicators, unless others use them."""
        if self._closed:
            raise TransportError(f"{step}: this NCCL transport was closed")
        self._watcher.check_usable(step)
        try:
            with translate_errors(step):
                return job()
        except futures.TimeoutError as error:
            self._watcher.late(error.args or peers, step, timeout)
        except TransportError as error:
            if self._backend.shared:
                raise
            failure = error
            self._watcher.fail(lambda how: failure)
        # What was found first: this may have failed because that has ended all.
        raise self._watcher.failure()


def _device_of(sends: Messages, recvs: Messages) -> torch.device | None:
    """Return the GPU of messages between GPUs; None for those of CPU tensors."""
    devices = (message.tensor.device for message in (*sends, *recvs))
    return next((device for device in devices if device.type != "cpu"), None)


def _end(watcher: Watcher, backend: Backend) -> None:
    watcher.stop()
    backend.close()
