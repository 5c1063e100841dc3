"""Warn when a rank has waited long for others, before the timeout makes it an error.

Code that waits in a loop has a `Stall` and calls its `check` from time to time. A wait outside
Python, as in gloo, is made `within` a Stall: one thread checks all of these.
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
from typing import NamedTuple

from collectives import validation

_logger = logging.getLogger(__name__)
_VARIABLE = "ADASUM_STALL_WARNING_SECONDS"
# As often as Horovod's stall inspector warns.
_SECONDS = 60.0
# How late a warning by the thread may be: it sleeps no longer before it looks for new waits.
_MAX_NAP = 1.0


@functools.cache
def warning_seconds() -> float:
    """Return the seconds after which a wait is warned of, and between two warnings.

    It is the environment variable ADASUM_STALL_WARNING_SECONDS, which is read once: 60 unless it is
    set, and infinity (never) if it is 0. ValueError if it is not a number of seconds.
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


class Wait(NamedTuple):
    """What is known of a thread's wait that took, or takes, long.

    step: The name of the step and its call in errors. late: For whom the thread waits, as when it
    last looked. since: When the wait began, by time.monotonic().
    """

    step: str
    late: str
    since: float


# By thread, the wait that it is in, or that ended by an error: what a flight record says of it.
waits: dict[int, Wait] = {}


class Stall:
    """One wait of a rank; it begins now, unless `since`, by time.monotonic(), is given.

    rank: The number of this rank in errors. step: The name of the step and its call there.
    timeout: Seconds after which the wait is an error. late: Returns for whom this rank waits, such
    as "rank 1, rank 3".
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
        self._thread = threading.get_ident()

    def check(self) -> float:
        """Warn if it is time to; return the seconds until the next warning."""
        waits[self._thread] = Wait(self._step, self._late(), self._since)
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
        """Start the time again, because something has arrived."""
        self._since, self._next = time.monotonic(), self._every

    def end(self) -> None:
        """Forget the wait: what it was for has come."""
        waits.pop(self._thread, None)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Return a context in which another thread calls `check` while this one waits."""
        # No thread for a warning that would come after the error.
        if self._next >= self._timeout:
            waits[self._thread] = Wait(self._step, self._late(), self._since)
            yield
            self.end()
            return
        _waits[id(self)] = self
        try:
            _start_thread()
            yield
        finally:
            _waits.pop(id(self), None)
        self.end()


# The waits that the thread checks, by id.
_waits: dict[int, Stall] = {}
_thread: threading.Thread | None = None


def _start_thread() -> None:
    """Start the thread that checks `_waits` unless it runs; it ends when there are none."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    thread = threading.Thread(target=_look, name="adasum-stall", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The system has no thread left. The wait itself goes on, without warnings.
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
