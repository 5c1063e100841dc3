"""The backends every kernel test runs on.

`cpu` is the CPU path, compiled or, `cpu_torch`, where nothing was; `triton` the Triton path on
a GPU, `emulator` the same code, compiled for sm_90 and run on CPU tensors by tests/ptx_emulator,
which looks for stray and misaligned accesses, races and hangs on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Backend:
    """device: where inputs go. launches: whether to kernels. slow: whether those are emulated, at
    microseconds an element."""

    device: str
    launches: bool = False
    slow: bool = False


def choose_cpu(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the CPU path's two ways; skip where it is not to be had."""
    import kernels
    from kernels.cpu import dispatch

    if path == "cpu_torch":
        monkeypatch.setattr(dispatch, "library", lambda: None)
    elif why_not := kernels.backend_info().why_torch:
        pytest.skip(f"no compiled CPU path: {why_not}")


@pytest.fixture(params=["cpu", "cpu_torch"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_cpu(request.param, monkeypatch)
    return str(request.param)


ON_GPU = pytest.param("triton", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "cpu_torch", "emulator", ON_GPU])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param.startswith("cpu"):
        choose_cpu(request.param, monkeypatch)
        yield Backend("cpu")
    elif request.param == "emulator":
        pytest.importorskip("triton")
        from tests.ptx_emulator.driver import emulated

        with emulated():
            yield Backend("cpu", launches=True, slow=True)
    else:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: the emulator runs what is compiled for one")
        yield Backend("cuda", launches=True)
