"""Timelines of the ranks' reductions, by torch.profiler; Horovod's names."""

from __future__ import annotations

import atexit
import os
import threading

import torch

from adasum.horovod.arguments import require
from collectives import default_group
from collectives.recorder import recording

# The running profiler, its file, and the thread that started it.
_current: tuple[torch.profiler.profile, str, int] | None = None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline by torch.profiler, for ui.perfetto.dev or chrome://tracing.

    For every reduction it shows, by name, how long the caller took to queue it and waited for it,
    besides torch.profiler's own records. Other threads, such as the one that reduces, appear only
    as far as torch.profiler records them. `stop_timeline`, or the end of the process, writes the
    file.

    Args:
        file_path: The file to overwrite. "{rank}" in the name becomes this rank's number; without
            it only rank 0 writes.
        mark_cycles: For compatibility with Horovod; no effect, as there are no cycles.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Another timeline or torch.profiler is running.
        OSError: The file cannot be written.
        RuntimeError: init() was not called.
    """
    global _current
    require("file_path", file_path, str, os.PathLike)
    require("mark_cycles", mark_cycles, bool)
    path, rank = os.fsdecode(file_path), default_group().rank
    if rank != 0 and "{rank}" not in path:
        return
    path = path.replace("{rank}", str(rank))
    if _current is not None:
        raise ValueError(f"a timeline is recorded for {_current[1]}: call stop_timeline() first")
    if recording():
        raise ValueError("a torch.profiler is running: its own timeline has the reductions")
    # Fail now if the file cannot be written, not at the end.
    with open(path, "wb"):
        pass
    profiler = torch.profiler.profile()
    profiler.start()
    _current = profiler, path, threading.get_ident()
    atexit.register(stop_timeline)


def stop_timeline() -> None:
    """End the timeline and write its file; do nothing if none is running.

    Raises:
        RuntimeError: Another thread started it: torch.profiler stops in the same thread only.
        OSError: The file cannot be written.
    """
    global _current
    if _current is None:
        return
    profiler, path, thread = _current
    if thread != threading.get_ident():
        raise RuntimeError("call stop_timeline() in the thread that called start_timeline()")
    _current = None
    atexit.unregister(stop_timeline)
    profiler.stop()
    profiler.export_chrome_trace(path)
