"""The roof: what a plain copy reaches on this device in this run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Far beyond any cache on a GPU; beyond a core's own caches on a CPU.
_ROOF_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def seconds(call: Callable[[], object], device: str, repeats: int = 9) -> float:
    """Median seconds of `call()`, after two unmeasured runs; device time on CUDA."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_roof(device: str) -> float:
    """Bytes a second, read plus written, of one large copy within `device`."""
    source = torch.rand(_ROOF_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _ROOF_BYTES[device] / seconds(lambda: target.copy_(source), device)
