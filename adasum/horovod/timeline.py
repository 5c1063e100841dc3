"""Timelines of the ranks' reductions, by torch.profiler; Horovod's names."""

from __future__ import annotations

import atexit
import os
import threading

import torch

from adasum.horovod.arguments import require
from collectives import default_group
from collectives.recorder import recording

# What is being recorded, the file that it goes to, and the thread that started it.
_current: tuple[torch.profiler.profile, str, int] | None = None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline by torch.profiler, for ui.perfetto.dev or chrome://tracing.

    Of every reduction it shows how long the caller took to queue it and waited for it, by name, and
    what torch.profiler records besides; of other threads, such as the one that reduces, it shows as
    much as torch.profiler does. `stop_timeline`, or the end of the process, writes the file.

    Args:
        file_path: The file, which is overwritten. In it "{rank}" stands for this rank's number;
            without that only rank 0 writes.
        mark_cycles: Horovod's; without effect, as there are no cycles.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A timeline is being recorded, or another torch.profiler is running.
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
    # Now, while the caller can still do something about it.
    with open(path, "wb"):
        pass
    profiler = torch.profiler.profile()
    profiler.start()
    _current = profiler, path, threading.get_ident()
    atexit.register(stop_timeline)


def stop_timeline() -> None:
    """End the timeline and write its file; nothing if there is none.

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
