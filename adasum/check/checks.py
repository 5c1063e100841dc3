"""The list of checks of this machine, and how one is run and said."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from adasum.check import one_gpu, ranks
from adasum.check.one_gpu import Check

# Odd, so that every kernel has a tail; the largest takes adasum's other path on every GPU.
SIZES = (1, 100_003, 9_000_001)
OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"
NO_GPU = "torch sees no GPU here"


def checks() -> dict[str, Check]:
    """Return the checks of this machine, by their lines' names and in their order."""
    found: dict[str, Check] = {"two ranks": functools.partial(_ranks, ranks.CPU, 2)}
    if not torch.cuda.is_available():
        return found
    gpus = torch.cuda.device_count()
    found |= one_gpu.KERNELS
    found |= {"graph replay": one_gpu.replayed, "two streams": one_gpu.two_streams}
    if gpus > 1:
        found["a GPU not current"] = one_gpu.second_gpu
    most = 1 << min(gpus, 8).bit_length() - 1
    for kind in (ranks.TORCH, ranks.CUPY):
        for size in (1, most)[: 1 + (most > 1)]:
            found[f"NCCL of {kind}, ranks: {size}"] = functools.partial(_ranks, kind, size)
    return found


def _ranks(kind: str, size: int, device: str, sizes: Sequence[int]) -> str:
    return ranks.start(kind, size)


def line(verdict: str, name: str, seconds: float, reason: str = "") -> str:
    """Return a check's line."""
    return f"{verdict:8} {name:24} {seconds:7.1f} s  {reason}".rstrip()


def say(text: str) -> None:
    """Print text and its end of line in one write, so that lines of several ranks stay whole."""
    # `print` writes them separately where Python does not buffer, as with PYTHONUNBUFFERED=1.
    print(f"{text}\n", end="", flush=True)


def run_here(names: Sequence[str], device: str = "cuda", sizes: Sequence[int] = SIZES) -> int:
    """Run these checks in this process up to the first that fails; return the exit status."""
    known = checks()
    for name in names:
        begin = time.perf_counter()
        try:
            said = known[name](device, sizes) or ""
            if torch.cuda.is_initialized():
                # An error of a launch shows itself here, and belongs to this line.
                torch.cuda.synchronize()
            verdict = OK
        except Exception as error:  # noqa: BLE001 - it is what the line is for
            verdict = LEFT_OUT if isinstance(error, ranks.NotInstalledError) else FAILED
            said = " ".join((str(error) or type(error).__name__).split())[:300]
        say(line(verdict, name, time.perf_counter() - begin, said))
        if verdict == FAILED:
            # After some errors CUDA is of no more use to a process.
            return 1
    return 0
