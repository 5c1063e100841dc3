"""When a rank times out, tell all ranks of the job to write their records.

Often the rank at fault is in no call: it hangs in the user's own code, and only its stack shows
where. So if ADASUM_FLIGHT_FOLDER names a folder, a thread on each rank looks at a key of the store
twice a second, as the monitor of torch's NCCL process group does, over a connection of its own. It
needs Python's lock: a rank that hangs in C code that holds the lock writes nothing. torch logs a
warning if the store ends while the group is open.
"""

from __future__ import annotations

import atexit
import faulthandler
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist

from collectives import recorder
from collectives.transport.process_groups import store_of

_KEY = "adasum flight alarm"
_SECONDS = 0.5
_current: Alarm | None = None


class Alarm(threading.Thread):
    """The thread of one rank; it ends at the first timeout, or when all groups are closed."""

    def __init__(self, write: Callable[[str, list[str]], None]) -> None:
        super().__init__(name="adasum-flight", daemon=True)
        assert dist.group.WORLD is not None
        self.own: queue.SimpleQueue[str] = queue.SimpleQueue()
        # torch's stubs lack clone(), which opens another connection.
        self._store: dist.Store = cast(Any, store_of(dist.group.WORLD)).clone()
        self._write = write

    def run(self) -> None:
        """Wait for a timeout of this rank, or of another one; "" in the queue ends the wait."""
        # The store may end before this rank.
        with suppress(dist.DistError):
            # An earlier group of this process group may have left a text.
            before = self._read()
            while not all(each.closed for each in recorder.of_process.groups):
                try:
                    timeout = self.own.get(timeout=_SECONDS)
                except queue.Empty:
                    if (found := self._read()) == before:
                        continue
                    self._write(found.decode().partition(" ")[2], _stacks())
                else:
                    if timeout:
                        self._store.set(_KEY, f"{time.time_ns()} {timeout}")
                        # This rank may keep the store, and end after its error.
                        time.sleep(2 * _SECONDS)
                return

    def _read(self) -> bytes:
        return self._store.get(_KEY) if self._store.check([_KEY]) else b""


def start(write: Callable[[str, list[str]], None]) -> None:
    """Start this rank's thread; it replaces the thread of an earlier group.

    write: called with another rank's error and the lines of this process's stacks.
    """
    global _current
    if _current is None:
        atexit.register(finish)
    finish()
    # The system may have no thread left, and a store of the user's own may have no clone().
    with suppress(RuntimeError):
        _current = Alarm(write)
        _current.start()


def finish(timeout: str = "") -> None:
    """End the thread, after it has told the other ranks of this rank's timeout, if any.

    timeout: the error's text. This takes up to three seconds, also if the store does not answer.
    """
    if _current is not None and _current.is_alive():
        _current.own.put(timeout)
        _current.join(6 * _SECONDS)


def _stacks() -> list[str]:
    """Return the lines of all threads' stacks, the main thread's first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    # faulthandler writes the oldest thread last.
    return "\n".join(reversed(threads)).splitlines()
