"""Named ranges in torch.profiler's timelines and, on CUDA, in NVTX for Nsight.

torch.profiler shows the ranges of the threads that it records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

NOTHING: AbstractContextManager[object] = nullcontext()


def recording() -> bool:
    """Return whether a profiler is recording; cheaper than an unused `span`."""
    # torch has no public function that says so.
    return torch.autograd.profiler._is_profiler_enabled


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """Return a context that is a range in profilers' timelines, with `cuda` an NVTX range, too.

    name: Returns the range's name; called only if the range can be seen.
    """
    profiled = torch.profiler.record_function(name()) if recording() else NOTHING
    return _with_nvtx(name(), profiled) if cuda else profiled


@contextmanager
def _with_nvtx(name: str, profiled: AbstractContextManager[object]) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiled:
            yield
    finally:
        torch.cuda.nvtx.range_pop()
