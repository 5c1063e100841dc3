"""How many kernels one call launches: the promise of one, whatever the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _projection, packing, reduction
from tests.kernels.cases import random
from tests.kernels.conftest import Backend

KERNELS = [
    (packing, "_copy_kernel"),
    (reduction, "_sum_kernel"),
    (reduction, "_scaled_add_kernel"),
    (_projection, "_dots_kernel"),
    (_projection, "_combine_kernel"),
    (_projection, "_one_launch_kernel"),
]


class Counted:
    """A kernel that notes its name for every launch."""

    def __init__(self, kernel: object, name: str, log: list[str]) -> None:
        self._kernel, self._name, self._log = kernel, name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self._log.append(self._name)
        return self._kernel[grid]  # type: ignore[index]


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels launched inside, in order; no other Triton kernel may run."""
    log: list[str] = []
    with monkeypatch.context() as patch:
        for module, name in KERNELS:
            patch.setattr(module, name, Counted(getattr(module, name), name, log))
        yield log


@pytest.fixture
def on_triton(backend: Backend) -> Backend:
    if not backend.launches:
        pytest.skip("the CPU path launches nothing")
    return backend


def tensors_of(backend: Backend, count: int, numel: int) -> list[Tensor]:
    return list(random(count * numel, torch.float32, backend.device, 1).split(numel))


@pytest.mark.parametrize(("count", "numel"), [(1, 5), (300, 16), (3, 4099)])
def test_a_list_is_one_launch(on_triton, monkeypatch, count, numel):
    tensors = tensors_of(on_triton, count, numel)
    with launches(monkeypatch) as log:
        buffer = kernels.pack(tensors, scale=0.5)
        kernels.unpack(buffer, tensors)
        kernels.sum_n(tensors)
    assert log == ["_copy_kernel", "_copy_kernel", "_sum_kernel"]


def test_a_list_of_two_dtypes_is_two_launches(on_triton, monkeypatch):
    tensors = [
        t.to(torch.float16) if i % 2 else t for i, t in enumerate(tensors_of(on_triton, 9, 7))
    ]
    layout = kernels.layout_of(tensors, dtype=torch.float32)
    with launches(monkeypatch) as log:
        kernels.pack(tensors, layout=layout)
    assert log == ["_copy_kernel"] * 2


@pytest.mark.parametrize("segments", [None, tuple(range(0, 2049, 64))])
def test_adasum_is_one_launch_on_chip(on_triton, monkeypatch, segments):
    a, b = (random(2048, torch.float32, on_triton.device, seed) for seed in (1, 2))
    found_inf = torch.zeros((), device=on_triton.device)
    with launches(monkeypatch) as log:
        kernels.adasum(a, b, segments, found_inf=found_inf)
    assert log == ["_one_launch_kernel"]


def test_adasum_beyond_the_chip_is_two(on_triton, monkeypatch):
    a, b = (random(5000, torch.float32, on_triton.device, seed) for seed in (1, 2))
    monkeypatch.setattr(_projection, "_programs", lambda *_: 0)
    with launches(monkeypatch) as log:
        kernels.adasum(a, b, (0, 10, 3000, 5000))
        kernels.dot_and_norms(a, b)
        kernels.scaled_add(a, b)
    assert log == ["_dots_kernel", "_combine_kernel", "_dots_kernel", "_scaled_add_kernel"]


def test_nothing_is_launched_for_nothing(on_triton, monkeypatch):
    empty = torch.empty(0, device=on_triton.device)
    with launches(monkeypatch) as log:
        kernels.adasum(empty, empty)
        kernels.sum_n([empty, empty])
        kernels.scaled_add(empty, empty)
        kernels.pack([])
    assert log == []
