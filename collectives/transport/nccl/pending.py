"""Steps that are on the streams while the host goes on, and whether one of them is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import cuda

# Beyond these the host waits for the first: CUDA lets whoever launches more than about a thousand
# things wait, without a limit, for a stream that waits for a rank.
MAX_PENDING = 64
_SPIN_SECONDS = 2e-3
_PAUSE_SECONDS = 2e-4
# How long the host has to notice by itself that a step is late, before it counts as blocked.
GRACE_SECONDS = 1.0


class Posted(NamedTuple):
    """A step under way: the event behind it, and what an error says where it never comes."""

    event: cuda.Event
    peers: tuple[int, ...]
    step: str
    timeout: float


def arrives(posted: Posted, start: float, check: Callable[[], None] | None = None) -> bool:
    """Wait on the host; return False where the step takes over its timeout.

    Args:
        posted: The step.
        start: When its timeout begins, of time.monotonic().
        check: Called whenever the event has been asked; raises what else ends the wait.
    """
    while True:
        # In this order: a step that NCCL has aborted may end, too.
        done = posted.event.query()
        if check is not None:
            check()
        waited = time.monotonic() - start
        if done or waited > posted.timeout:
            return done
        time.sleep(0.0 if waited < _SPIN_SECONDS else _PAUSE_SECONDS)


class Pending:
    """The steps that the host has put on the streams and does not wait for yet, in their order.

    Attributes:
        items: The steps.
        deferring: Whether steps are put off now.
        late: The step that took too long while the host was blocked in CUDA, as by what waits for
            the whole device. That ends only with the step, so the communicators were aborted.
    """

    def __init__(self) -> None:
        self.items: list[Posted] = []
        self.deferring = False
        self.late: Posted | None = None
        self._first: Posted | None = None
        self._since = 0.0

    @contextmanager
    def deferred(self, wait: Callable[[Posted, float], None]) -> Iterator[None]:
        """Let steps within be put off; leaving waits for all that were, one after the other.

        Args:
            wait: Waits for one, its timeout from then on, or raises. Of several contexts, one in
                another, the outermost alone counts.
        """
        if self.deferring:
            yield
            return
        self.deferring = True
        try:
            yield
            self._settle(0, wait)
        finally:
            self.deferring = False

    def put_off(self, posted: Posted, wait: Callable[[Posted, float], None]) -> None:
        """Add a step; wait for the first ones where there are too many."""
        self.items.append(posted)
        self._settle(MAX_PENDING, wait)

    def _settle(self, most: int, wait: Callable[[Posted, float], None]) -> None:
        while len(self.items) > most:
            wait(self.items[0], time.monotonic())
            del self.items[0]

    def check(self, abort: Callable[[], None]) -> None:
        """Abort where one step has been the first under way for too long. Called now and then."""
        # The host's thread takes steps away and adds others meanwhile.
        items = [*self.items]
        if self._first not in items:
            self._first, self._since = next(iter(items), None), time.monotonic()
        first = self._first
        if first is None or time.monotonic() - self._since <= first.timeout + GRACE_SECONDS:
            return
        # Not before: no event may be asked while a thread captures a graph.
        under_way = next((item for item in items if not item.event.query()), None)
        if under_way is not first:
            self._first, self._since = under_way, time.monotonic()
            return
        self.late = first
        abort()
