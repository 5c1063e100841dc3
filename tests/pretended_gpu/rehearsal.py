"""The parts of the first GPU day, each in a process that has the pretended GPU.

A part raises where something is not as it should be on a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.pretended_gpu import pretend
from tests.pretended_gpu.device import NAME, STEP, Device

# Small enough for the emulator, with a tail; of several tiles at the last.
SIZES = (1, 515, 1031)
DTYPES = {"float16", "bfloat16", "float32", "float64"}
# What takes seconds in the emulator, `test_commands.py` has there.
EMULATED = ("unpack", "scaled_add", "sum_n", "combine")
ROWS = {
    "packing": ("pack planned 4 KiB",),
    "reduction": ("scaled_add planned 4 KiB",),
    "projection": ("adasum planned 4 KiB",),
    "gram": ("gram planned 4 KiB",),
}


def facts(device: Device) -> dict[str, Any]:
    """What the machine has, by torch's names and by those of cupy's wheel."""
    from bench.gpu import machine, plan

    found = machine._find()
    assert found["device"] == NAME and found["capability"] == "9.0", found
    assert found["cupy"] == "14.2.0" and found["nccl of cupy"] == 23007, found
    assert not [each.name for each in plan.stages(found, None) if "NCCL" in each.left_out]
    return found


def checks(device: Device, names: Sequence[str] = (), emulated: Sequence[str] = EMULATED) -> None:
    """Every check of bench/gpu/sweep.py and adasum.check; of each its launches."""
    from adasum.check import checks as listed
    from bench.gpu import sweep

    listed.NUMEL = SIZES[1]
    of_check = listed.checks()
    assert [*of_check] == ["two ranks", "kernels", "NCCL of torch", "NCCL of cupy"]
    for name in names or [*sweep.KERNELS, *[*of_check][1:]]:
        device.emulated = name in emulated
        device.dtypes.clear()
        before = len(device.launches)
        if name in of_check:
            of_check[name].run()
        else:
            sweep.KERNELS[name]("cuda", SIZES)
        launched = len(device.launches) > before
        assert launched or "NCCL" in name, f"{name}: nothing was launched"
        if name in sweep.KERNELS:
            missing = sorted(DTYPES - device.dtypes)
            assert not missing, f"{name}: nothing was launched on {', '.join(missing)}"
    names_seen = {each.name for each in device.launches}
    if not names:
        found = {each.attributes for each in device.launches}
        wanted = {frozenset(), frozenset({"cooperative"}), frozenset({"dependent"})}
        assert found == wanted, f"attributes of launches: {found}"
        assert len(names_seen) >= 10, names_seen


def plans(device: Device) -> None:
    """A planned run is its launches and nothing else: no copy, no memset, no wait."""
    from tests.kernels.conftest import Backend
    from tests.kernels.test_plans import PLANS, pair

    device.emulated = False
    asked: list[int] = []
    primitive = torch._C._cuda_getDevice
    torch._C._cuda_getDevice = lambda: (asked.append(1), primitive())[1]
    for name, make in PLANS.items():
        plan: Any = make(pair(Backend("cuda", launches=True), 1))
        plan()
        asked.clear()
        clock, launches = device.clock, len(device.launches)
        plan()
        steps = round((device.clock - clock) / STEP)
        launches = len(device.launches) - launches
        wanted = 2 if name == "precise gram" else 1
        assert (steps, launches) == (wanted, wanted), f"{name}: {steps} steps, {launches} launches"
        # One with scratch asks for its tensors' device and for the stream, too.
        most = wanted * (3 if name in ("dot_and_norms", "adasum", "gram", "precise gram") else 1)
        assert len(asked) <= most, f"{name}: asked {len(asked)} times for the current device"


def streams(device: Device) -> None:
    """Tests of streams and of CUDA graphs, as far as one stream shows them."""
    import pytest

    device.emulated = False
    words = ["-m", "gpu", "-k", "streams_that_overlap or captured", "-q", "--no-header"]
    status = pytest.main(["tests/kernels/gpu/test_on_a_gpu.py", *words])
    assert status == 0, f"pytest ended with {status}"


def rows(device: Device, parts: Sequence[str] = tuple(ROWS)) -> None:
    """A row of each bench, timed by the device's clock; its peers as far as they go here."""
    import pytest

    from bench.gpu import plan
    from bench.kernels import inputs, timing

    device.emulated = False
    torch.cuda.get_device_properties(0).L2_cache_size = 1 << 20
    inputs.LARGE["cuda"] = 1 << 20
    timing.LIMITS = timing.Limits(0.0, 3, 3)
    assert timing.DEVICE == "cuda"
    torch.compile = _no_compiler
    for file in parts:
        for text in ROWS[file]:
            folder = Path(tempfile.mkdtemp())
            words = [
                word.replace("{out}", str(folder))
                for word in plan._rows("goals", file, 1.0).command
            ]
            assert words[:3] == [sys.executable, "-m", "pytest"]
            status = pytest.main([*words[3:], "--bench-rows", text, "-q", "--no-header"])
            assert status == 0, f"{text}: pytest ended with {status}"
            (path,) = folder.glob("*/partial/results.json")
            for row in json.loads(path.read_text())["rows"]:
                empty = row["times"]["empty launch"]["median"]
                assert abs(empty - STEP) < 1e-3 * STEP, (
                    f"{text}: an empty launch took {empty:.3g} s, by its clock {STEP:.3g} s"
                )
            shutil.rmtree(folder)


def _no_compiler(*_: object, **__: object) -> Callable[..., Any]:
    """Stand for torch.compile, which asks more of CUDA: the bench leaves out peers that fail."""

    def compiled(*_: object, **__: object) -> Any:
        raise RuntimeError("torch.compile makes no code for the pretended GPU")

    return compiled


def node(device: Device) -> None:
    """The kernels of a node's ranks, each a stream; what they compute is looked at."""
    from bench.collectives import node as bench
    from bench.gpu import plan

    device.emulated = False
    (stage,) = (each for each in plan.stages(facts(device), None) if each.name == plan.NODE)
    folder = Path(tempfile.mkdtemp())
    words = [word.replace("{out}", str(folder)) for word in stage.command[3:]]
    small = ("--ranks", "2", "--bytes", "4K", "--iters", "1")
    assert bench.main([*words, *small]) == 0, "elements were wrong"
    found = json.loads((folder / "ranks.json").read_text())["results"]
    assert [each["algorithm"] for each in found] == [bench.COPY, *bench.CONTENDERS]


def ranks(device: Device) -> None:
    """Two ranks that share the GPU, over cupy's wheel and the pretended NCCL."""
    from bench.collectives import one_gpu
    from bench.gpu import plan

    device.emulated = False
    (stage,) = (each for each in plan.stages(facts(device), None) if each.name == plan.RANKS)
    os.environ.update(stage.environment)
    # The pretended device captures for all threads at once, and its NCCL for none.
    os.environ["ADASUM_CUDA_GRAPHS"] = "0"
    folder = Path(tempfile.mkdtemp())
    words = [word.replace("{out}", str(folder)) for word in stage.command[3:]]
    assert one_gpu.main([*words, "--bytes", "8K", "--iters", "1"]) == 0, "elements were wrong"
    found = json.loads((folder / "ranks.json").read_text())["results"]
    assert [each["algorithm"] for each in found] == [*one_gpu.CONTENDERS]


def host(device: Device) -> None:
    """What calls cost the host, on the device's tensors."""
    from bench.kernels import host_cost

    device.emulated = False
    host_cost._REPEATS = host_cost._ENQUEUED = 1
    assert host_cost.main(["--gpu"]) == 0


PARTS: dict[str, Callable[..., object]] = {
    each.__name__: each for each in (facts, checks, plans, streams, rows, node, ranks, host)
}


def rehearse(given: Mapping[str, Any]) -> None:
    """Run `parts` of `given`, each with its options, in this process."""
    # Of the tests that started this: they would tell pytest-benchmark that nothing can be timed.
    for variable in [each for each in os.environ if each.startswith("PYTEST_XDIST_")]:
        del os.environ[variable]
    device = pretend.install({pretend.COUNTED: "0"})
    try:
        for name, options in given["parts"].items():
            PARTS[name](device, **options)
            print(f"{name}: as it should be", flush=True)
    finally:
        print(f"{time.process_time():.1f} s of the processor", flush=True)
