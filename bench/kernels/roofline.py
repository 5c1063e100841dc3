"""The roof: what a plain copy reaches on this device, timed beside the kernels in each row."""

from __future__ import annotations

import functools

import torch

from bench.kernels.timing import DEVICE, Call

# Far beyond any cache: H200 has 60 MB of L2; two of these are four times a server core's L3.
LARGE = {"cuda": 1 << 30, "cpu": 1 << 26}


def copy_roof(traffic: int, device: str = DEVICE) -> tuple[Call, int]:
    """A copy to time beside a kernel that moves `traffic` bytes, and the bytes it moves itself.

    CUDA: always the large one. CPU: as much traffic as the kernel has, so that a kernel whose data
    stay in a cache is held against that cache, up to the large one.
    """
    size = LARGE[device]
    if device == "cpu":
        size = max(4096, min(size, traffic // 2 // 4 * 4))
    return _copy(size, device), 2 * size


@functools.lru_cache(maxsize=1)
def _copy(size: int, device: str) -> Call:
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
