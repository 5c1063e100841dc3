"""Every training of `tests.adasum.trainings`: processes give the bits of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from tests.adasum.trainings import every_training
from tests.processes.harness import run_ranks


def process_job(rank: int) -> dict[str, Any]:
    hvd.init(timeout=60.0)
    answers = {name: value.double().numpy() for name, value in every_training().items()}
    hvd.shutdown()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_training_in_processes_gives_the_bits_of_threads(size: int) -> None:
    threads = collectives.run_threads(size, lambda group: every_training())
    processes = run_ranks(size, process_job, timeout=150.0)
    for name, want in threads[0].items():
        assert want.isfinite().all(), name
        for rank in range(size):
            assert torch.equal(threads[rank][name], want), f"{name}: thread {rank}"
            got = torch.from_numpy(processes[rank][name])
            assert torch.equal(got, want.double()), f"{name}: process {rank}"
