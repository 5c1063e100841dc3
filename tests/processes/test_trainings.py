"""Every training of `tests.adasum.trainings` in float32, beside the same in float64 on CPUs.

Two processes: on a GPU that both share, over what a group takes by default, and on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from tests.adasum.definition import PLACE, flat, loss_of, make_model, relative_error, tolerance
from tests.adasum.trainings import STEPS, every_training
from tests.processes.harness import run_ranks
from tests.processes.test_nccl import ONE_GPU, TIMEOUT, why_not

# Of each step a wrong definition would leave more than 1e-4; roundings of 16 bits leave that, too.
NARROW = ("compressed", "autocast")
STEP = 10.0


def bound_of(name: str) -> float:
    """As `trajectory_tolerance`, of float32; what rounds to 16 bits differs by some of these."""
    narrow = name.startswith(NARROW)
    return 0.01 if narrow else STEP * STEPS * tolerance(torch.float32)


def hooks() -> dict[str, torch.Tensor]:
    """Return the parameters that DDP with each operator's hook ends with."""
    found = {}
    for op in (hvd.Average, hvd.Adasum):
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(hvd.HookState(op=op), hvd.ddp_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        found[f"ddp_hook, {op}"] = flat(model)
    return found


def job(rank: int, device: str) -> dict[str, tuple[float, list[float]]]:
    """For each training how far float32 on the device ends from float64 on CPUs, and where."""
    if device == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            os.environ.update(ONE_GPU)
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group()
    hvd.init(timeout=TIMEOUT)
    try:
        exact = every_training() | hooks()
        PLACE.update(device=device, dtype=torch.float32)
        found = {name: value.cpu() for name, value in (every_training() | hooks()).items()}
    finally:
        hvd.shutdown()
        torch.distributed.destroy_process_group()
    return {
        name: (relative_error(value, exact[name]), value.tolist()) for name, value in found.items()
    }


def devices() -> Iterator[object]:
    yield pytest.param("cuda", marks=pytest.mark.gpu)
    yield pytest.param("cpu", marks=pytest.mark.slow)


@pytest.mark.parametrize("device", devices())
def test_trainings_in_float32_end_where_those_in_float64_do(device: str) -> None:
    if device == "cuda" and (reason := why_not(2)):
        pytest.skip(reason)
    first, second = run_ranks(2, job, device, timeout=300.0)
    assert {name: at for name, (_, at) in first.items()} == {
        name: at for name, (_, at) in second.items()
    }
    errors = {name: error for name, (error, _) in first.items()}
    assert {name: error for name, error in errors.items() if not error <= bound_of(name)} == {}
