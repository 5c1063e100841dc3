"""A WARNING of a rank that waits for others, long before its timeout is an error.

Whoever waits in a loop keeps a `Stall` and calls its `check` now and then. What waits where Python
cannot look, as gloo does, waits `within` one: a thread looks at all of these.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collectives import validation

_logger = logging.getLogger(__name__)
_VARIABLE = "ADASUM_STALL_WARNING_SECONDS"
_SECONDS = 60.0
# How late a thread that looks at the waits of others may be.
_MAX_NAP = 1.0


@functools.cache
def warning_seconds() -> float:
    """Return after how long a wait is warned of, and how often: ADASUM_STALL_WARNING_SECONDS.

    60 unless it is set, infinity where it is 0, for never. It is read once.

    Raises:
        ValueError: The variable is not a number of seconds.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return _SECONDS
    try:
        seconds = float(text)
        if seconds:
            validation.timeout(seconds)
    except ValueError:
        raise ValueError(
            f"{_VARIABLE} must be a positive number of seconds, or 0 for no warnings, got {text!r}"
        ) from None
    return seconds or math.inf


class Stall:
    """One wait of a rank.

    Args:
        rank: What errors call this rank.
        step: What an error calls the step, with its call.
        timeout: Seconds after which the wait is an error.
        late: Says for whom this rank waits, such as "rank 1, rank 3".
        since: When the wait began, by time.monotonic(); now unless given.
    """

    def __init__(
        self,
        rank: int,
        step: str,
        timeout: float,
        late: Callable[[], str],
        since: float | None = None,
    ) -> None:
        self._rank = rank
        self._step = step
        self._timeout = timeout
        self._late = late
        self._since = time.monotonic() if since is None else since
        self._every = warning_seconds()
        self._next = self._every

    def check(self) -> float:
        """Warn where it is time; return the seconds until it is again."""
        waited = time.monotonic() - self._since
        if waited >= self._next:
            self._next = (waited // self._every + 1) * self._every
            _logger.warning(
                "rank %d has waited %.3g s for %s in %s: an error after %.3g s",
                self._rank,
                waited,
                self._late(),
                self._step,
                self._timeout,
            )
        return self._next - waited

    def is_due(self) -> bool:
        """Whether `check` would warn."""
        return time.monotonic() - self._since >= self._next

    def restart(self) -> None:
        """Begin anew: something has come."""
        self._since, self._next = time.monotonic(), self._every

    @contextmanager
    def within(self) -> Iterator[None]:
        """Let a thread call `check` while this one waits."""
        if self._next >= self._timeout:
            yield
            return
        _waits[id(self)] = self
        try:
            _start_thread()
            yield
        finally:
            _waits.pop(id(self), None)


# The waits that the thread looks at.
_waits: dict[int, Stall] = {}
_thread: threading.Thread | None = None


def _start_thread() -> None:
    """Start what looks at `_waits`, unless it runs; it ends by itself where there are none."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    thread = threading.Thread(target=_look, name="adasum-stall", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # No thread is to be had: there are no warnings then.
        return
    _thread = thread


def _look() -> None:
    """Check each wait when it is due."""
    global _thread
    while True:
        while _waits:
            # Nothing of a wait is kept while this sleeps. With the last reference to a process
            # group this thread would destroy it, and be stopped in torch's code, which ends the
            # process by SIGABRT, where the interpreter exits meanwhile.
            nap = min([_MAX_NAP, *(wait.check() for wait in list(_waits.values()))])
            time.sleep(max(0.0, nap))
        # Who has not seen this line has added its wait before the next one.
        _thread = None
        if not _waits:
            return
