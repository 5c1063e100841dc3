"""Named ranges in the profilers' timelines.

Collectives run in a thread of their own: torch.profiler shows them if it looks at all threads, by
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
On CUDA the same ranges are NVTX's, for Nsight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def span(name: Callable[[], str], *, cuda: bool = False) -> AbstractContextManager[object]:
    """A range over what runs within, named only where somebody looks. cuda: also an NVTX range."""
    if not (cuda or torch.autograd.profiler._is_profiler_enabled):
        return _NOTHING
    return _ranges(name(), cuda)


_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _ranges(name: str, cuda: bool) -> Iterator[None]:
    with torch.profiler.record_function(name):
        if not cuda:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
