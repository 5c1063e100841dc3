"""The kernels compile for an MI300, AMD's gfx942: no AMD GPU has run that code, nor an emulator."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from bench.static_analysis import compiled
from bench.static_analysis.cases import KERNELS, Case
from kernels.gpu import launcher

CASES = [
    pytest.param(name, dtype, marks=() if name in ("sum_n", "one_launch") else pytest.mark.slow)
    for name, kernel in KERNELS.items()
    # What ranks of a node wait for has a limit by NVIDIA's timer.
    if "pads" not in kernel.function.arg_names
    for dtype in kernel.dtypes
    # Of those with other numbers of tensors, and of narrow dtypes, the largest.
    if dtype in ("fp32", "fp64") or name in ("sum_n", "one_launch", "gram8")
]


def _said(code: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", code)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_kernel_compiles_without_a_spill(name: str, dtype: str) -> None:
    code = compiled.compile_case(Case(name, "plain", dtype, 90), "gfx942").asm["amdgcn"]
    assert _said(code, "vgpr_spill_count") == 0 and _said(code, "private_segment_fixed_size") == 0
    # Then four programs of two warps of 64 are on a compute unit, as the one launch counts them.
    assert _said(code, "vgpr_count") <= 256


def test_programs_have_as_many_threads_where_warps_are_wider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for width, expected in ((32, [1, 4, 8]), (64, [1, 2, 4])):
        target = SimpleNamespace(warp_size=width)
        active = SimpleNamespace(get_current_target=lambda target=target: target)
        runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
        monkeypatch.setattr(launcher, "triton", SimpleNamespace(runtime=runtime))
        assert [launcher._warps(count) for count in (1, 4, 8)] == expected
