"""NCCL through cupy, with communicators of our own.

NCCL's start-up, split, first use of a connection, destroy and abort wait for other ranks without a
limit, so they run in threads that are waited for with a limit. cupy destroys a communicator when
Python collects it. A NCCL group must be ended even after a failure in it (NCCL's user guide, "Group
Calls" and "Fault Tolerance"; cupy 14.2).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import cuda

from collectives.errors import TransportError
from collectives.transport.base import Messages, Transport, gather_bytes
from collectives.transport.nccl import backend
from collectives.transport.nccl.backend import Backend, CommunicationStream, translate_errors
from collectives.transport.process_groups import run_beside

# The dtypes that both NCCL and gloo can sum: no other integers, no bools, no 8-bit floats.
DTYPES = {
    getattr(torch, name): f"NCCL_{name.upper()}"
    for name in ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]
}
# The first version of cupy whose unique ids are bytes.
_CUPY_VERSION = [14, 2]
# Limit for an abort, which would wait for ranks that are gone for ever; an error is due within 5 s
# after the timeout.
_ABORT_SECONDS = 3.0


def load_nccl() -> Any:
    """Return the module `cupy.cuda.nccl`.

    RuntimeError if torch sees no GPU. ImportError, which names the packages to install, if cupy or
    NCCL is missing, too old or for another CUDA than torch's.
    """
    if not cuda.is_available():
        raise RuntimeError(
            "NCCL needs a GPU that torch sees: install a CUDA build of torch and NVIDIA's driver, "
            "or use CPU tensors"
        )
    major = 12 if (torch.version.cuda or "").startswith("12.") else 13
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy
            from cupy.cuda import nccl, runtime
        cupys = runtime.runtimeGetVersion() // 1000
        version = [int(part) for part in cupy.__version__.split(".")[:2]]
        if nccl.available and version >= _CUPY_VERSION and cupys == major:
            return nccl
        found = f"cupy-cuda{cupys}x {cupy.__version__}, {'an' if nccl.available else 'no'} NCCL"
    except ImportError as error:
        found = str(error)
    raise ImportError(
        f"NCCL through cupy needs cupy for CUDA {major} only, and NCCL (found: {found}): pip "
        f'install "cupy-cuda{major}x>=14.2" nvidia-nccl-cu{major}'
    )


@functools.cache
def shared_stream(device: torch.device) -> CommunicationStream:
    """Return the one stream of a device for all groups of this process, since NCCL needs one order.

    Several ranks in one process must not share it: one would wait in its turn for another's work.
    """
    return CommunicationStream(device)


class CupyBackend(Backend):
    """A rank's communicator on one device, and communicators of fewer ranks split from it.

    Making one raises the errors of `load_nccl`.

    Args:
        device: This rank's GPU, the current one unless given.
        stream: A communication stream to share with other backends of this device; new by default.
    """

    device: torch.device

    def __init__(
        self, device: torch.device | None = None, *, stream: CommunicationStream | None = None
    ) -> None:
        self._nccl = load_nccl()
        self.device = device or torch.device("cuda", cuda.current_device())
        if self.device.type != "cuda" or self.device.index is None:
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {self.device}')
        self._stream = stream or CommunicationStream(self.device)
        # All communicators, None once they have ended; and the split ones, by their ranks.
        self._made: list[Any] | None = []
        self._parts: dict[tuple[int, ...], Any] = {}
        # Uses that NCCL has made its connections for.
        self._connected: set[Any] = set()
        # Guards `_made`. Reentrant: any allocation may make Python collect the transport.
        self._lock = threading.RLock()

    def open(self, host: Transport, device: torch.device, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._rank = host.rank
        self._others = [rank for rank in range(host.size) if rank != host.rank]
        mine = self._nccl.get_unique_id() if host.rank == 0 else b""
        name = gather_bytes(mine, host, "start-up", timeout)[0]
        left = max(deadline - time.monotonic(), 0.1)
        self._whole = self._make(self._nccl.NcclCommunicator, left, host.size, name, host.rank)

    def stream(self, device: torch.device) -> CommunicationStream:
        return self._stream

    def exchange(self, sends: Messages, recvs: Messages, timeout: float) -> None:
        whole, kind, stream = self._whole, self._nccl.NCCL_UINT8, self._stream.stream.cuda_stream

        def post() -> None:
            for messages, call in ((sends, whole.send), (recvs, whole.recv)):
                for peer, tensor in messages:
                    call(tensor.data_ptr(), tensor.nbytes, kind, peer, stream)

        peers = {("send", peer) for peer, _ in sends} | {("recv", peer) for peer, _ in recvs}
        self._group(post, peers, timeout)

    def all_reduce(self, values: torch.Tensor, among: Any, timeout: float) -> None:
        # All ranks split the communicator together, at the first call with these sets of ranks.
        if among is None or len(among) == len(self._others) + 1:
            part = self._whole
        elif (part := self._parts.get(among)) is None:
            color, key = among[0], among.index(self._rank)
            part = self._make(self._whole.commSplit, timeout, color, key)
            self._parts[among] = part
        kind, add = getattr(self._nccl, DTYPES[values.dtype]), self._nccl.NCCL_SUM
        address, numel, stream = values.data_ptr(), values.numel(), self._stream.stream.cuda_stream

        def post() -> None:
            part.allReduce(address, address, numel, kind, add, stream)

        if numel:
            # NCCL connects for each of its algorithms, and chooses the algorithm by the length.
            self._group(post, {(among, numel, kind)}, timeout)

    def check(self) -> None:
        # With the lock, so that no other thread frees a communicator meanwhile.
        with self._lock:
            for communicator in self._made or ():
                communicator.check_async_error()

    def abort(self) -> str:
        """Abort all communicators, and calls still running in other threads, within 3 s."""
        self._end("abort", _ABORT_SECONDS)
        return "its NCCL communicator was aborted"

    def close(self) -> None:
        """Destroy all communicators; wait at most 5 s for the other ranks."""
        with translate_errors("close"):
            for error in self._end("destroy", backend.CLOSE_SECONDS):
                raise error

    def split(self, host: Transport) -> CupyBackend:
        """Return a backend on the same stream: all ranks must start the work in the same order."""
        return CupyBackend(self.device, stream=self._stream)

    def _bounded(self, job: Callable[[], Any], timeout: float, *peers: int) -> Any:
        """Return the result of a job that may wait for `peers`; TimeoutError after `timeout`."""
        results: list[Any] = []

        def run() -> None:
            cuda.set_device(self.device)
            results.append(job())

        _, errors = run_beside(run, "nccl-call", timeout)
        if errors:
            raise errors[0]
        if not results:
            raise TimeoutError(*peers)
        return results[0]

    def _make(self, make: Callable[..., Any], timeout: float, *args: Any) -> Any:
        """Return the communicator that `make(*args)` returns; it is ended with all others."""

        def run() -> Any:
            made = make(*args)
            # Never collected: cupy would destroy it then, and wait for ranks that are gone.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
            with self._lock:
                if self._made is not None:
                    self._made.append(made)
                    return made
            # The caller has timed out, and the other communicators were ended meanwhile.
            made.abort()
            return made

        return self._bounded(run, timeout, *self._others)

    def _group(self, job: Callable[[], None], uses: set[Any], timeout: float) -> None:
        """Call a job between groupStart and groupEnd. uses: NCCL connects at the first of each."""

        def run() -> None:
            if self._made is None:
                raise TransportError("the NCCL communicators were ended")
            self._nccl.groupStart()
            try:
                job()
            except BaseException:
                # groupEnd of a failed group reports the failure again; raise the first error.
                with suppress(self._nccl.NcclError, KeyError):
                    self._nccl.groupEnd()
                raise
            self._nccl.groupEnd()

        if uses <= self._connected and not cuda.is_current_stream_capturing():
            run()
        else:
            self._bounded(run, timeout)
            self._connected |= uses

    def _end(self, how: str, seconds: float) -> list[BaseException]:
        """End all communicators once, each in its own thread; return the errors."""
        deadline = time.monotonic() + seconds
        with self._lock:
            made, self._made = self._made or [], None
        started: list[tuple[threading.Thread, list[BaseException]]] = []
        # From Python 3.12 on no thread starts while the interpreter exits; the exit ends them, too.
        with suppress(RuntimeError):
            for each in made:
                started.append(run_beside(getattr(each, how), f"nccl-{how}", 0.0))
        for thread, _ in started:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return [error for _, errors in started for error in errors]
