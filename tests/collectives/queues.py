"""A queue of calls that are plain functions, and what holds up a group's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives import Group
from collectives.call import Call
from collectives.recorder import GroupRecord
from collectives.transport import ThreadWorld
from collectives.work import CallQueue, Work
from tests.collectives.transport.thread_ranks import TIMEOUT


class Queue(CallQueue):
    """One rank's."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        super().__init__(ThreadWorld(1).transport(0), timeout, GroupRecord((0,), 0))

    def call(self, function: Callable[[], Any]) -> Any:
        """Make a synchronous call."""
        return self.run(Call("call", "queue"), function)

    def later(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor] = ()) -> Work[Any]:
        """Make an asynchronous call."""
        return self.submit(Call("later", "queue", tensors=tensors), function)

    def begun(self, first: Callable[[], Any], rest: Callable[[], Any]) -> Work[Any]:
        """Begin a call in this thread if it can be."""
        return self.begin(Call("begun", "queue"), first, rest)


def hold(queue: CallQueue | Group) -> threading.Event:
    """Let the communication thread run a call that ends when the event is set."""
    queue = queue._calls.queue if isinstance(queue, Group) else queue
    started, gate = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert gate.wait(TIMEOUT)

    queue.submit(Call("hold", "queue"), wait)
    assert started.wait(TIMEOUT)
    return gate


def done(work: Work[Any]) -> Any:
    """Return its result, which is there within some seconds though nobody waits."""
    finished = threading.Event()
    work.add_done_callback(finished.set)
    assert finished.wait(TIMEOUT)
    return work.wait()
