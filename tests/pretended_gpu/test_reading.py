"""The verdicts of C on CUDA tensors, which are those of Python's checks: on the pretended GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cpu import test_calls as calls
from tests.kernels.cpu.cases import need_compiled
from tests.pretended_gpu import pretend
from tests.processes.nursery import nursery

# The others are of what only a CPU has, or of storages, which the pretended GPU cannot resize.
KINDS = (
    *("plain", "parameter", "at an offset", "follows a gradient", "float64", "integers"),
    *("shorter", "more dimensions", "0-d", "empty", "negative", "subclass", "none"),
)
FUNCTIONS = ("sum_n", "sum_n with found_inf", "scaled_add", "combine", "gram", "pack", "unpack")


def compare(_: Any) -> None:
    """Compare all verdicts, in a process that then has the GPU."""
    pretend.install({pretend.COUNTED: "1"})
    calls.DEVICE = "cuda"
    asked, decided = calls.Asked(pytest.MonkeyPatch()), 0
    for function in FUNCTIONS:
        for kind in (*KINDS, "on the CPU"):
            for place in range(4):
                asked.same(functools.partial(_call, function, kind, place))
                taken = kind in ("plain", "parameter", "at an offset")
                if taken and place in calls.PLACES.get(function, range(4)):
                    assert asked.read, (function, kind, place)
                assert not (asked.read and kind == "on the CPU" and place < 2)
                decided += asked.read
    assert decided > 100
    print("as Python has them")


def _call(function: str, kind: str, place: int) -> Callable[[], Any]:
    given = calls.arguments(function)
    if kind == "on the CPU":
        given[place] = given[place].cpu()
    else:
        with torch.device("cuda"):
            given[place] = calls.STAND_INS[kind][0](given[place].shape)
    return functools.partial(calls.CALLS[function], *given)


@pytest.mark.timeout(300)
def test_verdicts_on_cuda_tensors(tmp_path: Path) -> None:
    need_compiled()
    pytest.importorskip("triton")
    log = tmp_path / "log.txt"
    process = nursery().start(f"{__name__}:compare", None, {}, log)
    status = process.wait(time.monotonic() + 280.0)
    assert status == 0 and "as Python has them" in log.read_text(), log.read_text()[-4000:]
