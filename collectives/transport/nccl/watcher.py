"""Steps that are on the streams while the host goes on, and what ends those that cannot end.

The host puts a step on a stream and returns. Nobody but a `Watcher` then knows that it is under
way: it is asked by the host's thread, and looks by itself now and then in a thread of its own,
which goes on while CUDA blocks the host's. A step that waits for a rank that is gone ends with its
communicator alone, so the watcher aborts that, and keeps why for whoever asks: the next call, and a
Work's wait().
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import cuda

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from collectives.stall import Stall
from collectives.transport.base import Transport
from collectives.transport.nccl.backend import Backend, translate_errors

# Beyond these the host waits for the first: CUDA lets whoever launches more than about a thousand
# things wait, without a limit, for a stream that waits for a rank.
MAX_PENDING = 64
# How often steps under way are looked at beside the host.
CHECK_SECONDS = 0.25
# What a rank has sent before it ended may still be arriving for so long.
GRACE_SECONDS = 1.0
_PAUSE_SECONDS = 2e-4


class Posted(NamedTuple):
    """A step under way: the event behind it, and what an error says where it never comes."""

    event: cuda.Event
    peers: tuple[int, ...]
    step: str
    timeout: float
    since: float


class Watcher:
    """The steps that a transport has put on streams and that have not ended as far as is known.

    The time of a step begins when it is put on a stream, and not before those ahead of it are known
    to have come. No event is asked but by the host's thread while it posts or waits outside of a
    capture, or where a step is late or a peer is gone: that would end the capture of a CUDA graph
    in any thread. So a step behind one that nobody has asked for may take up to twice its timeout.

    Its thread begins with the first step, never keeps the process from ending, and ends by `stop`.

    Args:
        host: Names the ranks, and knows which are gone.
        backend: Tells of asynchronous errors, and aborts all that is under way.

    Attributes:
        items: The steps, in their order.
        error: What ended them. Nothing can be put on the streams afterwards.
    """

    def __init__(self, host: Transport, backend: Backend) -> None:
        self.items: deque[Posted] = deque()
        self.error: CollectiveError | None = None
        self._host = host
        self._backend = backend
        self._raised = False
        # When the last step that was the first under way was known to have come.
        self._passed = 0.0
        # A peer that is gone, and since when it is known.
        self._suspect: tuple[int, float] | None = None
        # The wait for the first step, where that has been looked at.
        self._stall: tuple[Posted, Stall] | None = None
        # Held while all is ended: until then an event that comes may be of an aborted step.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, posted: Posted) -> None:
        """Watch a step; wait for the first ones where there are too many."""
        with self._lock:
            self.items.append(posted)
            if self._thread is None:
                name = f"nccl-watch-{self._host.rank}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self.settle(MAX_PENDING)

    def settle(self, most: int = 0) -> None:
        """Wait on the host until at most `most` steps are under way; raise what ended them."""
        while True:
            with self._lock:
                self._drop_done()
                self.raise_error()
                if len(self.items) <= most:
                    return
                if self._is_late(first := self.items[0]):
                    self.late(first.peers, first.step, first.timeout)
                    self.raise_error()
            time.sleep(_PAUSE_SECONDS)

    def is_idle(self) -> bool:
        """Whether all has come; asks CUDA."""
        with self._lock:
            self._drop_done()
            return not self.items

    def finish(self) -> None:
        """Wait for all steps before what carries them is closed.

        Raises what ended them, unless it was raised before.
        """
        if not self._raised:
            self.settle()

    def raise_error(self) -> None:
        """Raise what ended the steps, if anything did."""
        # Where all is being ended now, not before that is done.
        with self._lock:
            if self.error is not None:
                raise self.failure()

    def failure(self) -> CollectiveError:
        """Return what ended the steps, to be raised: a new error, for several threads may."""
        assert self.error is not None
        self._raised = True
        made = type(self.error)(str(self.error))
        made.__cause__ = self.error
        return made

    def check_usable(self, step: str) -> None:
        """Raise what ended the steps if it was not yet, else that no others can be posted."""
        if self._raised:
            raise TransportError(
                f"{step}: this NCCL transport is unusable since {self.error}"
            ) from self.error
        self.raise_error()

    def fail(self, say: Callable[[str], CollectiveError]) -> None:
        """End all steps and keep the error, which may say how that went. The first one counts."""
        with self._lock:
            if self.error is None:
                self.error = say(self._backend.abort())
                self.items.clear()

    def abort(self, reason: str) -> None:
        """End all steps for whoever knows why, and raises that: `finish` need not."""
        self.fail(lambda how: TransportError(f"{reason} ({how})"))
        self._raised = True

    def late(self, peers: tuple[int, ...], step: str, timeout: float) -> None:
        """End all steps: one took over its timeout."""
        said = f"{self._no_answer(peers, step)} (stopped after {timeout:g} s)"
        self.fail(lambda how: CollectiveTimeoutError(f"{said}: {how}"))

    def watch(self) -> None:
        """End all where the first step is late, a peer of its is gone, or NCCL has failed.

        Long before it is late there is a WARNING.
        Called now and then beside the host's thread.
        """
        with self._lock:
            first = self.items[0] if self.items else None
        if first is None or self.error is not None:
            return
        try:
            with translate_errors(first.step):
                self._backend.check()
        except TransportError as error:
            failure = error
            self.fail(lambda how: failure)
            return
        peer = self._gone_peer(first)
        if peer is None and not self._is_late(first):
            self._warn(first)
            return
        with self._lock:
            # Where the first has come the next one's time begins.
            if self._drop_done() or self.error is not None:
                return
            if peer is None:
                self.late(first.peers, first.step, first.timeout)
                return
            said = f"{self._no_answer((peer,), first.step)}: {self._named((peer,))} has ended; "
            self.fail(lambda how: CollectiveTimeoutError(said + how))

    def stop(self) -> None:
        """End the thread."""
        # No Event, whose lock another thread may hold where a process is forked.
        self._stopped = True

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(CHECK_SECONDS)
            # CUDA's errors reach the host's thread, too.
            with suppress(RuntimeError):
                self.watch()

    def _warn(self, first: Posted) -> None:
        """Warn of a step that has not come for long; only then ask CUDA whether it has."""
        if self._stall is None or self._stall[0] is not first:
            since, rank = max(first.since, self._passed), self._host.name(self._host.rank)
            late = functools.partial(self._named, first.peers)
            self._stall = first, Stall(rank, first.step, first.timeout, late, since)
        stall = self._stall[1]
        if stall.is_due():
            with self._lock:
                if not self._drop_done():
                    stall.check()

    def _gone_peer(self, first: Posted) -> int | None:
        """Return a peer of this step that has been gone for longer than its messages take."""
        peer = None
        # The host's thread may close its connections now; that ends this, too.
        with suppress(CollectiveError, ValueError, OSError):
            peer = self._host.gone(first.peers or None)
        if peer is None:
            self._suspect = None
        elif self._suspect is None or self._suspect[0] != peer:
            self._suspect = peer, time.monotonic()
        elif time.monotonic() - self._suspect[1] > GRACE_SECONDS:
            return peer
        return None

    def _no_answer(self, peers: tuple[int, ...], step: str) -> str:
        return f"{self._host.me} got no answer from {self._named(peers)} in {step}"

    def _named(self, peers: tuple[int, ...]) -> str:
        names = tuple(map(self._host.name, peers))
        if not names:
            return "the other ranks"
        return f"rank {names[0]}" if len(names) == 1 else f"one of the ranks {names}"

    def _is_late(self, first: Posted) -> bool:
        return time.monotonic() - max(first.since, self._passed) > first.timeout

    def _drop_done(self) -> bool:
        """Forget the first steps that have come; return whether there were any."""
        any_done = False
        while self.items and self.items[0].event.query():
            self.items.popleft()
            self._passed, any_done = time.monotonic(), True
        return any_done
