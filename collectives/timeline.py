"""A timeline of this process in Chrome's trace format, from time stamps of our own.

torch.profiler records only the thread that started it, and collectives also run in another one.
Both can be used at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from typing import Any

_logger = logging.getLogger(__name__)
# Some 500 events: few system calls, and a process that is killed loses little.
_FLUSH_BYTES = 1 << 16

# The timeline that is being written, if any.
current: Timeline | None = None


class Timeline:
    """Ranges of time by thread, written to a file while they happen.

    The file is one JSON array whose end may be missing, as the format allows: the file of a process
    that was killed is readable, too. Time stamps are those of the wall clock, so that the files of
    several ranks fit together, as far as their hosts' clocks agree. An existing file is
    overwritten; OSError where that cannot be written.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        # Unbuffered: a forked process would write Python's buffer a second time.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open until `close`
        self._size = 0
        self._process = os.getpid()
        self._to_wall_clock = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._pending = bytearray(b"[\n" + self._metadata("process_name", 0, name=f"rank {rank}"))
        # Viewers sort by name where nothing else is said, "rank 10" before "rank 2".
        self._pending += b",\n" + self._metadata("process_sort_index", 0, sort_index=rank)

    def add(self, name: str, begin: int, end: int) -> None:
        """Write a range of this thread; begin and end by time.perf_counter_ns()."""
        # A forked child has copies of the file and of the lock, which another thread may have held.
        if os.getpid() != self._process:
            return
        thread = threading.get_native_id()
        micros = (begin + self._to_wall_clock) / 1e3
        event = {"name": name, "cat": "adasum", "ph": "X", "ts": micros, "dur": (end - begin) / 1e3}
        line = _line({**event, "pid": self._rank, "tid": thread})
        with self._lock:
            if self._file.closed:
                return
            if thread not in self._threads:
                self._threads.add(thread)
                name = threading.current_thread().name
                self._pending += b",\n" + self._metadata("thread_name", thread, name=name)
            self._pending += b",\n" + line
            if len(self._pending) >= _FLUSH_BYTES:
                self._flush()

    def close(self) -> None:
        """End and close the file; `add` then does nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._file.closed:
                self._pending += b"\n]\n"
                self._flush()
                self._file.close()

    def _metadata(self, kind: str, thread: int, **args: str | int) -> bytes:
        return _line({"name": kind, "ph": "M", "pid": self._rank, "tid": thread, "args": args})

    def _flush(self) -> None:
        pending, self._pending = memoryview(self._pending), bytearray()
        size = len(pending)
        try:
            while pending:
                pending = pending[self._file.write(pending) :]
            self._size += size
        except OSError as error:
            _logger.warning("the timeline %s ends here: %s", self.path, error)
            # The array's end may be missing, an event's may not.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            self._file.close()


def _line(event: dict[str, Any]) -> bytes:
    """Return an event as JSON in UTF-8: Perfetto shows the escapes of other letters as they stand.

    What is no text of Unicode, such as a file's name may be, is written as JSON's escape.
    """
    return json.dumps(event, ensure_ascii=False).encode(errors="backslashreplace")


def start(path: str, rank: int) -> None:
    """Write a timeline from now on; ValueError if one is being written already."""
    global current
    if current is not None:
        raise ValueError(
            f"a timeline is being written to {current.path}: call stop_timeline() first"
        )
    current = Timeline(path, rank)
    atexit.register(stop)


def stop() -> None:
    """End the timeline, if one is being written."""
    global current
    if current is not None:
        ending, current = current, None
        ending.close()
        atexit.unregister(stop)
