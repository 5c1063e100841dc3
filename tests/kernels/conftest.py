"""The backends every kernel test runs on.

`cpu` is the torch path, `triton` the Triton path on a GPU, `emulator` the same code, compiled for
sm_90 and run on CPU tensors by bench/ptx, which looks for stray and misaligned accesses, races and
hangs on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from bench.ptx.driver import emulated


@dataclass(frozen=True)
class Backend:
    """device: where inputs go. launches: whether to kernels. slow: whether those are emulated, at
    microseconds an element."""

    device: str
    launches: bool = False
    slow: bool = False


@pytest.fixture(params=["cpu", "emulator", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cpu":
        yield Backend("cpu")
    elif request.param == "emulator":
        pytest.importorskip("triton")
        with emulated():
            yield Backend("cpu", launches=True, slow=True)
    else:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: the emulator runs what is compiled for one")
        yield Backend("cuda", launches=True)
