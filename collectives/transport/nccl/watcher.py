"""Watch the steps that are on streams, and abort steps that cannot end.

The host puts each step on a stream and returns. If the step's peer is gone, only an abort of the
communicator ends the step. A `Watcher` does that, in a thread of its own, which runs even
while CUDA blocks the host's thread. It keeps the error for the next call and for Work's wait().
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.stall import Stall
from collectives.transport.base import Transport
from collectives.transport.nccl.backend import Backend, translate_errors
from collectives.transport.process_groups import run_beside

# With more steps under way the host waits for the first ones. Otherwise CUDA would block the host
# after about a thousand launches.
MAX_PENDING = 64
# Interval between two checks by the watcher's thread.
CHECK_SECONDS = 0.25
# Messages sent before their sender ended may arrive for so long afterwards.
GRACE_SECONDS = 1.0
# Limit for ending graphs, launches and the thread, which takes no time unless CUDA has failed.
_END_SECONDS = 0.5
# CU_STREAM_CAPTURE_MODE_RELAXED of CUDA's driver.
_RELAXED = 2
# A waiting host sleeps so long between two checks: short compared with the time of one step.
_PAUSE_SECONDS = 2e-4


@dataclass(eq=False)
class Posted:
    """A step that is put on a stream: details for its errors, and the event recorded after it.

    held: An object to keep alive until the step has ended.
    """

    peers: tuple[int, ...]
    step: str
    timeout: float
    held: object = None
    event: Any = None
    since: float = field(default_factory=time.monotonic)


class Watcher:
    """The steps that a transport has put on streams and that are not known to have ended.

    A step's timeout starts when it is put on a stream, or when all steps before it are known to
    have ended, whichever is later. The watcher's thread queries an event only if its step is late,
    is due for a warning, or needs a peer that is gone.

    `host` knows which peers are gone. `end_launches` ends kernels that wait for peers, and graphs,
    since an abort would wait for those.

    Attributes:
        items: The steps, in their order.
        error: The error that ended them. Nothing can be put on the streams afterwards.
        raised: Whether the error was raised to a caller.
    """

    def __init__(self, host: Transport, backend: Backend, end_launches: Callable[[], None]) -> None:
        self.items: deque[Posted] = deque()
        self.error: CollectiveError | None = None
        self.raised = False
        self._host = host
        self._backend = backend
        self._end_launches = end_launches
        # When the last step was seen to end, and when a peer of the first step was seen to be gone.
        self._passed, self._gone_since = 0.0, math.inf
        # The step that `_stall` warns about.
        self._warned: Posted | None = None
        # Held during an abort: an event that completes then may belong to an aborted step.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, posted: Posted) -> None:
        """Watch another step; if there are too many, wait until the first ones have ended."""
        with self._lock:
            self.items.append(posted)
            if self._thread is None:
                name = f"nccl-watch-{self._host.rank}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self.settle(MAX_PENDING)

    def settle(self, most: int = 0) -> None:
        """Wait on the host until at most `most` steps are under way; raise their error, if any."""
        while self.count() > most:
            with self._lock:
                if self.items and self._is_late(self.items[0]):
                    self.late(self.items[0])
            self.raise_error()
            time.sleep(_PAUSE_SECONDS)
        self.raise_error()

    def count(self) -> int:
        """Return how many steps are under way, after a query of their events."""
        with self._lock:
            self._drop_done()
            return len(self.items)

    def raise_error(self, step: str = "") -> None:
        """Raise a copy of the error that ended the steps, if any; several threads may raise it.

        step: The step that cannot start. If given and if the error was raised before, a
        TransportError says that the transport is unusable.
        """
        # With the lock: if the steps are being aborted, wait until that is done.
        with self._lock:
            if self.error is None:
                return
            if step and self.raised:
                said = f"{step}: this NCCL transport is unusable since {self.error}"
                raise TransportError(said) from self.error
            self.raised = True
            raise type(self.error)(str(self.error)) from self.error

    def fail(self, error: CollectiveError) -> None:
        """Abort all steps and keep the first error."""
        with self._lock:
            if self.error is None:
                run_beside(self._end_launches, "nccl-end-launches", _END_SECONDS)
                self.error = type(error)(f"{error}; {self._backend.abort()}")
                self.error.__cause__ = error.__cause__
                self.items.clear()

    def late(self, posted: Posted, peers: tuple[int, ...] = (), why: str = "") -> None:
        """Abort all steps because one took longer than its timeout, or because of `why`."""
        named = self._named(peers or posted.peers)
        why = why or f" (stopped after {posted.timeout:g} s)"
        said = f"{self._host.me} got no answer from {named} in {posted.step}{why}"
        self.fail(CollectiveTimeoutError(said))

    def stop(self) -> None:
        """End the thread: if it queried an event during the interpreter's exit, that would abort.

        In a forked child nothing may call this: the thread that held a lock may not exist there.
        """
        self._stopped.set()
        # The thread itself may collect the transport, and it may be waiting in an abort.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def watch(self) -> None:
        """Abort all steps if the first is late, a peer of it is gone, or NCCL has failed.

        Warn long before the first step is late. The watcher's thread calls this regularly.
        """
        with self._lock:
            if not self.items:
                return
            first, now, peer = self.items[0], time.monotonic(), None
            try:
                with translate_errors(first.step):
                    self._backend.check()
            except TransportError as error:
                self.fail(error)
                return
            # The host's thread may be closing its connections; the watch then ends, too.
            with suppress(CollectiveError, ValueError, OSError):
                peer = self._host.gone(first.peers or None)
            self._gone_since = math.inf if peer is None else min(self._gone_since, now)
            gone = now - self._gone_since > GRACE_SECONDS
            if not gone and not self._is_late(first):
                self._warn(first)
            # If the first step has ended after all, the next step's timeout starts now.
            elif not self._drop_done():
                if peer is None:
                    self.late(first)
                else:
                    self.late(first, (peer,), f": {self._named((peer,))} has ended")

    def _run(self) -> None:
        _relax_captures()
        while not self._stopped.wait(CHECK_SECONDS):
            # The host's thread gets CUDA's errors, too, so none is lost here.
            with suppress(RuntimeError):
                self.watch()

    def _warn(self, first: Posted) -> None:
        """Warn if the first step takes long; do not query its event before a warning is due."""
        if self._warned is not first:
            since, rank = max(first.since, self._passed), self._host.name(self._host.rank)
            named = partial(self._named, first.peers)
            self._stall = Stall(rank, first.step, first.timeout, named, since)
            self._warned = first
        if self._stall.is_due() and not self._drop_done():
            self._stall.check()

    def _named(self, peers: tuple[int, ...]) -> str:
        several = "one of " if len(peers) > 1 else ""
        return several + self._host.named(peers) if peers else "the other ranks"

    def _is_late(self, first: Posted) -> bool:
        return time.monotonic() - max(first.since, self._passed) > first.timeout

    def _drop_done(self) -> bool:
        """Remove the steps that have ended, in order; return whether there were any."""
        any_done = False
        while self.items and self.items[0].event.query():
            self.items.popleft()
            self._passed, self._gone_since, any_done = time.monotonic(), math.inf, True
        return any_done


def _relax_captures() -> None:
    """Let this thread query events during a capture of a CUDA graph in "global" mode.

    Such a query would otherwise end the capture, in any thread. torch's own watchdog of NCCL does
    the same, but neither torch nor cupy offers the call in Python.
    """
    mode = ctypes.c_int(_RELAXED)
    # Without such a driver there are no captures.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
