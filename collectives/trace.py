"""Named ranges in our own timeline, in torch.profiler's and, on CUDA, in NVTX for Nsight.

torch.profiler shows the ranges of the threads that it records: the caller's, but not those of the
communication thread. Our timeline (`collectives.timeline`) shows all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns

import torch

from collectives import timeline


def recording() -> bool:
    """Return whether a timeline or the profiler is recording; cheaper than an unused `span`."""
    # torch has no public function that says so.
    return timeline.current is not None or torch.autograd.profiler._is_profiler_enabled


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """Return a context that shows as a range in timelines, with `cuda` an NVTX range, too.

    name: Returns the range's name; called only while something is recording.
    """
    profiled = torch.autograd.profiler._is_profiler_enabled
    if not (cuda or profiled or timeline.current is not None):
        return NOTHING
    return _ranges(name(), cuda, profiled)


NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _ranges(name: str, cuda: bool, profiled: bool) -> Iterator[None]:
    # The timeline is read once: another one may be started before the range ends.
    writing, begin = timeline.current, perf_counter_ns()
    if cuda:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name) if profiled else NOTHING:
            yield
    finally:
        if cuda:
            torch.cuda.nvtx.range_pop()
        if writing is not None:
            writing.add(name, begin, perf_counter_ns())
