"""The backends every kernel test runs on.

`cpu` is the CPU path, compiled or, `cpu_torch`, where nothing could be; `triton` the Triton path on
a GPU, `emulator` the same code, compiled for sm_90 and run on CPU tensors by tests/ptx_emulator,
which looks for stray and misaligned accesses, races and hangs on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

import kernels
from kernels import _recall, packing, projection, reduction
from kernels._known import KnownCalls
from kernels.cpu import native
from tests.ptx_emulator.driver import emulated


@dataclass(frozen=True)
class Backend:
    """device: where inputs go. launches: whether to kernels. slow: whether those are emulated, at
    microseconds an element."""

    device: str
    launches: bool = False
    slow: bool = False


def choose_cpu(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the CPU path's two ways; skip where it is not to be had."""
    if path == "cpu_torch":
        monkeypatch.setattr(native._state, "libraries", {})
    elif why_not := native.why_not():
        pytest.skip(f"no compiled CPU path: {why_not}")


def forget_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no call had been made yet."""
    for module, name in (
        *((packing, "_PACKS"), (packing, "_UNPACKS"), (reduction, "_SUMS")),
        *((reduction, "_SCALED_ADDS"), (projection, "_DOTS"), (projection, "_COMBINES")),
        (projection, "_ADASUMS"),
    ):
        monkeypatch.setattr(module, name, KnownCalls())


def recognise_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the C functions that recognise calls are not to be had."""
    _recall.load(wait=True)
    for name in ("recognise", "sum_n", "scaled_add", "copy"):
        monkeypatch.setattr(_recall, name, _recall.not_known)


@pytest.fixture(params=["C", "Python"])
def nothing_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor will be, but by these."""
    forget_calls(monkeypatch)
    if request.param == "Python":
        recognise_in_python(monkeypatch)
    elif (by := _recall.calls_recognised_by()) != "C":
        pytest.skip(by)


@pytest.fixture
def in_c() -> None:
    for by, name in (
        (kernels.calls_recognised_by(), "C"),
        (kernels.cpu_path(), "compiled"),
    ):
        if by != name:
            pytest.skip(by)


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, what C leaves to Python is an error."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("left to Python")

    def forbid() -> None:
        for module in (packing, reduction):
            monkeypatch.setattr(module, "check_scalar", fail)

    return forbid


@pytest.fixture(params=["cpu", "cpu_torch"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_cpu(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture(params=["cpu", "cpu_torch", "emulator", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param.startswith("cpu"):
        choose_cpu(request.param, monkeypatch)
        yield Backend("cpu")
    elif request.param == "emulator":
        pytest.importorskip("triton")
        with emulated():
            yield Backend("cpu", launches=True, slow=True)
    else:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: the emulator runs what is compiled for one")
        yield Backend("cuda", launches=True)
