"""The thread that calls NCCL for one device.

NCCL forbids that two threads use a communicator, or several communicators of one device, at once,
and its groups belong to a thread (user guide, "Thread Safety" and "Group Calls"). NCCL's calls may
also wait for other ranks without a limit: made in a thread of their own, they can be waited for
with a timeout.
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
    """A thread that calls NCCL for one device, and puts all work on one stream.

    Communicators that share it (`shared_thread`) are used one after the other, on the host and on
    the GPU, as NCCL requires for one device. It does not keep the process from exiting, and ends
    when this object is collected. If a call does not return in time, its thread is abandoned with
    it and another thread takes over.

    Attributes:
        stream: The communication stream.
        turn: Held while work is put on it, or captured: another communicator's would be, too.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.stream = cuda.Stream(device)
        # Reentrant: what is captured is posted meanwhile, and Python may collect another transport.
        self.turn = threading.RLock()
        self._device = device
        self._name = name
        self._jobs: _Jobs = queue.SimpleQueue()
        self._start()
        weakref.finalize(self, self._jobs.put, None)

    def call(self, job: Callable[[], T], timeout: float) -> T:
        """Return what `job` returns; futures.TimeoutError if it takes longer than `timeout` s."""
        if threading.current_thread() is self._thread:
            # Python has collected a transport during a job, and its closing calls this.
            return job()
        future: futures.Future[T] = futures.Future()
        # Whoever acquires it first decides which thread runs the next jobs: this one if the job
        # ends first, or a new one if the caller times out first.
        goes_on = threading.Lock()
        self._jobs.put((future, job, goes_on))
        try:
            return future.result(timeout)
        except futures.TimeoutError:
            # A job that has not begun is cancelled. One that has must not hold up the next jobs.
            if not future.cancel() and goes_on.acquire(blocking=False):
                self._start()
            raise

    def _start(self) -> None:
        args = self._jobs, self._device
        self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
        self._thread.start()


def _serve(jobs: _Jobs, device: torch.device) -> None:
    """Run jobs, until one was abandoned together with this thread."""
    cuda.set_device(device)
    while (item := jobs.get()) is not None:
        future, job, goes_on = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                future.set_exception(error)
            if not goes_on.acquire(blocking=False):
                # The caller has given up and started another thread.
                return
        # So that the job, and what it refers to, does not stay alive while waiting for the next.
        del item, future, job


_shared: weakref.WeakValueDictionary[torch.device, CallingThread] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def shared_thread(device: torch.device) -> CallingThread:
    """Return the thread that calls NCCL for all groups of this process on a device.

    Not for several ranks in one process: a call of one would block the thread while it waits for a
    call of another.
    """
    with _sharing:
        thread = _shared.get(device)
        if thread is None:
            thread = _shared[device] = CallingThread(device, f"nccl-{device}")
    return thread
