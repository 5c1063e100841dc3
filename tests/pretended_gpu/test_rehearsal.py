"""The first GPU day on the pretended GPU, and that it finds the faults that such days had."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.pretended_gpu import build, rehearsal
from tests.processes.nursery import nursery

pytestmark = pytest.mark.slow
SECONDS = 160.0


def rehearse(folder: Path, seconds: float = SECONDS, **given: Any) -> tuple[int | None, str]:
    """Run parts in a process of their own; return its status and what it said."""
    if build.cupy() is None:
        pytest.skip("pip cannot get cupy's wheel")
    log = folder / "log.txt"
    process = nursery().start("tests.pretended_gpu.rehearsal:rehearse", given, {}, log)
    status = process.wait(time.monotonic() + seconds)
    return status, log.read_text(errors="replace")


@pytest.mark.parametrize("part", rehearsal.PARTS)
def test_part_of_the_first_day_ends_as_it_should(part: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    status, said = rehearse(tmp_path, parts={part: {}})
    assert status == 0 and f"{part}: as it should be" in said, said[-6000:]


class Fault(NamedTuple):
    """What stands in the place of `old` in a module's source, and what the rehearsal then says."""

    part: dict[str, Any]
    module: str
    old: str
    new: str
    says: str


def _checks(name: str) -> dict[str, Any]:
    return {"checks": {"names": [name]}}


FAULTS = {
    "a name that cupy does not have": Fault(
        {"facts": {}},
        "bench.gpu.machine",
        "load_nccl().get_version()",
        "load_nccl().getversion()",
        r"has no attribute 'getversion'",
    ),
    "an argument too few for cupy": Fault(
        {"ranks": {}},
        "collectives.transport.nccl.cupy_backend",
        "left, host.size, name, host.rank)",
        "left, host.size, name)",
        r"TypeError: __init__\(\) takes .*positional arguments",
    ),
    "a kernel's argument left out": Fault(
        _checks("scaled_add"),
        "kernels.gpu.sum_kernels",
        "call.findings,\n            out.numel(),\n            A=a.dtype",
        "out.numel(),\n            A=a.dtype",
        r"missing 1 required positional argument: 'element_count'",
    ),
    "a launch that is not cooperative": Fault(
        _checks("adasum"),
        "kernels.gpu.projection_kernels",
        "launch_cooperative_grid=True",
        "launch_cooperative_grid=False",
        r"_one_launch_kernel: attributes frozenset\(\), asked for was .*cooperative",
    ),
    "a launch that does not overlap the one ahead": Fault(
        _checks("adasum"),
        "kernels.gpu.projection_kernels",
        '{"launch_pdl": True} if dependent',
        '{"launch_pdl": False} if dependent',
        r"_combine_kernel: attributes frozenset\(\), asked for was .*dependent",
    ),
    "a result with one element wrong": Fault(
        _checks("scaled_add"),
        "kernels.gpu.sum_kernels",
        "out.numel(),\n            A=a.dtype",
        "out.numel() - 1,\n            A=a.dtype",
        r"element 0 is nan, .* 1 of 1 are wrong",
    ),
    "a dtype that a check leaves out": Fault(
        _checks("scaled_add"),
        "tests.kernels.gpu.sweep",
        "for dtype in kernels.DTYPES:",
        "for dtype in kernels.DTYPES[1:]:",
        r"scaled_add: nothing was launched on float16",
    ),
    "a wrong unit of an event's time": Fault(
        {"rows": {"parts": ["reduction"]}},
        "bench.kernels.timing",
        "return start.elapsed_time(stop) / 1e3",
        "return start.elapsed_time(stop) / 1e6",
        r"an empty launch took 1e-08 s, by its clock 1e-05 s",
    ),
    "a variable that NCCL does not read": Fault(
        {"ranks": {}},
        "bench.gpu.plan",
        '"NCCL_MULTI_RANK_GPU_ENABLE"',
        '"NCCL_MULTI_RANK_GPU_ENABLED"',
        r"NCCL failed in start-up: NCCL_ERROR_INVALID_USAGE",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_fault_is_found_by_the_rehearsal(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    part, *fault, says = FAULTS[name]
    status, said = rehearse(tmp_path, parts=part, fault=fault)
    assert status not in (0, None) and re.search(says, said), said[-6000:]
