"""Timelines of the ranks' reductions; Horovod's names."""

from __future__ import annotations

import os

from adasum.horovod.arguments import require
from collectives import default_group, timeline


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write a timeline of this rank's reductions, for ui.perfetto.dev or chrome://tracing.

    For every reduction: how long the caller took to queue it and waited for it, and in the thread
    that ran it how long this rank waited for the others to make the call, and how long the
    reduction took, by name, operator, algorithm and bytes. Times are of the host: on CUDA a
    reduction is what it took to put it on its stream. It runs beside any profiler, and ends with
    `stop_timeline` or the process.

    Args:
        file_path: The file, which is overwritten. In it "{rank}" stands for this rank's number;
            without that rank 0 alone writes.
        mark_cycles: Horovod's; without effect, as there are no cycles.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A timeline is being written.
        OSError: The file cannot be written.
        RuntimeError: init() was not called.
    """
    require("file_path", file_path, str, os.PathLike)
    require("mark_cycles", mark_cycles, bool)
    path, rank = os.fsdecode(file_path), default_group().rank
    if rank == 0 or "{rank}" in path:
        timeline.start(path.replace("{rank}", str(rank)), rank)


def stop_timeline() -> None:
    """End the timeline, and its file; nothing where there is none."""
    timeline.stop()
