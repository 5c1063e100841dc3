"""Named ranges in profilers' timelines.

Collectives run in a thread of their own. torch.profiler shows them if it records all threads:
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
On CUDA the same ranges appear in NVTX, for Nsight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """Return a context that is a range in the profiler's timeline.

    Args:
        name: Returns the range's name; called only while something records.
        cuda: Whether to make an NVTX range, too.
    """
    if not (cuda or torch.autograd.profiler._is_profiler_enabled):
        return _NOTHING
    return _ranges(name(), cuda)


_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _ranges(name: str, cuda: bool) -> Iterator[None]:
    if cuda:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if cuda:
            torch.cuda.nvtx.range_pop()
