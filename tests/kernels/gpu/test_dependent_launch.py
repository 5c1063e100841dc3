"""Adasum in two launches, of which the second is set up while the first one ends."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

import kernels  # noqa: E402
from kernels.gpu import launcher  # noqa: E402
from kernels.gpu.launcher import Kernel, Launch  # noqa: E402
from tests.kernels.cases import DTYPES, bits, poisoned, random  # noqa: E402

CUTS = (0, 700, 704, 2048, 2051)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_launches_that_overlap_give_the_bits_of_launches_that_do_not(backend, monkeypatch, dtype):
    """The emulator raises an error where the second one does not wait before its first access."""
    if not backend.launches:
        pytest.skip("the CPU path launches nothing")
    a, b = (random(CUTS[-1], dtype, backend.device, seed) for seed in (1, 2))
    chip = launcher.chip_of(a.device)
    assert chip.dependent_launch or backend.device != "cpu"
    bind, bound = Kernel.bind, []

    def noted(kernel: Kernel, *given: Any, **constants: Any) -> Launch:
        bound.append((kernel.function.__name__, constants.get("launch_pdl", False)))
        return bind(kernel, *given, **constants)

    def adasum() -> list[bytes]:
        out, found = poisoned(CUTS[-1], dtype, backend.device), torch.zeros((), device=a.device)
        kernels.adasum(a, b, CUTS, out=out, found_inf=found, cooperative=False)
        return [bits(out), bits(found)]

    monkeypatch.setattr(Kernel, "bind", noted)
    together = adasum()
    # Alone, it has a launch of anyone's ahead of it.
    kernels.combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS)
    unable = chip._replace(dependent_launch=False)
    with mock.patch.object(launcher, "chip_of", return_value=unable):
        assert adasum() == together
    dots, plain = ("_dots_kernel", False), ("_combine_kernel", False)
    overlapping = ("_combine_kernel", chip.dependent_launch)
    assert bound == [dots, overlapping, dots, plain, dots, plain]


@pytest.mark.parametrize(
    ("major", "hip", "driver", "expected"),
    [
        (9, None, 12030, True),
        (10, None, 13000, True),
        (9, None, 12020, False),
        (9, None, None, False),
        (8, None, 13000, False),
        (9, "6.4", 13000, False),
    ],
)
def test_launches_overlap_where_gpu_and_driver_can_also_in_a_graph(
    monkeypatch, major, hip, driver, expected
):
    chip = {"multi_processor_count": 132, "L2_cache_size": 60 << 20}
    properties = SimpleNamespace(major=major, minor=3, **chip)

    def version(result: Any) -> int:
        result._obj.value = driver
        return 0

    def library(name: str) -> Any:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ctypes, "CDLL", library)
    capability = 10 * major + 3 if hip is None else 0
    assert launcher.chip_of.__wrapped__(torch.device("cuda", 0)) == launcher.Chip(
        132, 60 << 20, expected, capability
    )
