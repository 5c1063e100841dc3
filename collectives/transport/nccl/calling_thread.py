"""The thread that calls NCCL for one device.

A communicator, and all communicators of one device, must not be used from two threads at once, and
a group is a thread's own (NCCL's user guide, "Thread Safety" and "Group Calls"). Calls of NCCL may
also wait for other ranks without a limit: whoever waits for the thread does so for a time.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import torch
from torch import cuda

T = TypeVar("T")
_Job = tuple[futures.Future[Any], Callable[[], Any], threading.Lock]
_Jobs = queue.SimpleQueue[_Job | None]


class CallingThread:
    """Calls NCCL for one device; all its work goes to one stream.

    All communicators that share it (`shared_thread`) are so used one after the other, on the host
    and on the GPU, as NCCL demands of those of one device. It never keeps the process from ending,
    and ends when it is collected. A call that does not return in time is left behind with its
    thread, and another thread goes on.

    Args:
        device: The GPU.
        name: The thread's name.

    Attributes:
        stream: The communication stream.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream = cuda.Stream(device)
        self._device = device
        self._name = name
        self._jobs: _Jobs = queue.SimpleQueue()
        self._start()
        weakref.finalize(self, self._jobs.put, None)

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Return what `job` returns; futures.TimeoutError where it takes over `timeout` s."""
        if threading.current_thread() is self._thread:
            # What the job does has collected a transport, and that is closed.
            return job()
        future: futures.Future[T] = futures.Future()
        goes_on = threading.Lock()
        self._jobs.put((future, job, goes_on))
        try:
            return future.result(timeout)
        except futures.TimeoutError:
            # Not begun: it never will be. Else others must not wait behind it.
            if not future.cancel() and goes_on.acquire(blocking=False):
                self._start()
            raise

    def _start(self) -> None:
        args = self._jobs, self._device
        self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
        self._thread.start()


def _serve(jobs: _Jobs, device: torch.device) -> None:
    """Do the jobs, up to one that was left behind with this thread."""
    cuda.set_device(device)
    while (item := jobs.get()) is not None:
        future, job, goes_on = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                future.set_exception(error)
            if not goes_on.acquire(blocking=False):
                # Whoever waited no longer did, and has started another thread.
                return
        # Neither the job nor what it holds may live on while the next one is waited for.
        del item, future, job


_shared: weakref.WeakValueDictionary[torch.device, CallingThread] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def shared_thread(device: torch.device) -> CallingThread:
    """Return what calls NCCL for all groups of this process that are on a device.

    Where one process is one rank: of two ranks in a process each waits for the other's calls.
    """
    with _sharing:
        thread = _shared.get(device)
        if thread is None:
            thread = _shared[device] = CallingThread(device, f"nccl-{device}")
    return thread
