"""Named ranges in the profilers' timelines.

Collectives run in a thread of their own: torch.profiler shows them if it looks at all threads, by
`experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
On CUDA the same ranges are NVTX's, for Nsight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def span(name: str, *, cuda: bool = False) -> Iterator[None]:
    """A range over what runs within. cuda: also an NVTX range."""
    with torch.profiler.record_function(name):
        if not cuda:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
