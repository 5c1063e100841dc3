"""Warn if this rank waits long for others, before the timeout makes it an error.

Code that waits in a loop has a `Stall` and calls its `check` from time to time. For waits outside
Python, as in gloo, a thread calls it: wait in the context `within()`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from collectives import validation

_logger = logging.getLogger(__name__)
_VARIABLE = "ADASUM_STALL_WARNING_SECONDS"
# The interval of Horovod's stall inspector.
_SECONDS = 60.0
# The longest sleep of the thread, in seconds: it may notice a new wait so much later.
_MAX_NAP = 1.0


@functools.cache
def warning_seconds() -> float:
    """Return the seconds between warnings: ADASUM_STALL_WARNING_SECONDS, infinity for 0, or 60.

    Raises ValueError if it is not a number of seconds.
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
    """One wait of `rank`, from now on or since `since`, by time.monotonic().

    The warning names `rank`, `step` and `timeout`; `late` returns a text for the ranks that it
    waits for, such as "rank 1, rank 3".
    """

    def __init__(
        self,
        rank: int,
        step: str,
        timeout: float,
        late: Callable[[], str],
        since: float | None = None,
    ) -> None:
        self._rank, self._step, self._timeout, self._late = rank, step, timeout, late
        self._since = time.monotonic() if since is None else since
        self._next = warning_seconds()

    def check(self) -> float:
        """Warn if it is due; return the seconds until the next warning."""
        waited = time.monotonic() - self._since
        if waited >= self._next:
            self._next = (waited // warning_seconds() + 1) * warning_seconds()
            _logger.warning(
                "rank %d has waited %.3g s for %s in %s: an error after %.3g s",
                *(self._rank, waited, self._late(), self._step, self._timeout),
            )
        return self._next - waited

    def is_due(self) -> bool:
        """Whether `check` would warn."""
        return time.monotonic() - self._since >= self._next

    def restart(self) -> None:
        """Restart the time: data arrived."""
        self._since, self._next = time.monotonic(), warning_seconds()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Return a context for a wait; another thread calls `check` meanwhile."""
        # No thread if the timeout comes before the first warning.
        if self._next < self._timeout:
            _checked[id(self)] = self
            if _thread is None or not _thread.is_alive():
                _start_thread()
        try:
            yield
        finally:
            _checked.pop(id(self), None)


# The waits that the thread checks, by id.
_checked: dict[int, Stall] = {}
_thread: threading.Thread | None = None


def _start_thread() -> None:
    """Start the thread that checks waits."""
    global _thread
    # If the system has no thread left, the wait continues without warnings.
    with suppress(RuntimeError):
        _thread = threading.Thread(target=_check_all, name="adasum-stall", daemon=True)
        _thread.start()


def _check_all() -> None:
    """Check each wait when it is due."""
    while True:
        # Keep no reference to any wait during the sleep. With the last reference to a process group
        # this thread would destroy it; if the interpreter exits at that moment, the thread is
        # stopped in torch's code, which ends the process by SIGABRT.
        nap = min([_MAX_NAP, *(stall.check() for stall in list(_checked.values()))])
        time.sleep(max(0.0, nap))
