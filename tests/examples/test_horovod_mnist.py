"""The Horovod script of examples/, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.harness import run_ranks, script

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_mnist.py"
# What the script calls, all of it in Horovod 0.28.1's horovod.torch.
HOROVOD = {
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "allreduce",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "local_rank",
    "rank",
    "size",
}


@pytest.mark.parametrize(
    "option", ["--use-adasum", pytest.param("--fp16-allreduce", marks=pytest.mark.slow)]
)
def test_horovod_mnist_example_trains(option):
    printed = run_ranks(2, script, str(SCRIPT), "--epochs", "5", option)[0]
    accuracies = [float(each) for each in re.findall(r"Accuracy: ([\d.]+)%", printed)]
    assert len(accuracies) == 5
    # Guessing gives 10 %.
    assert accuracies[-1] > 60


def test_horovod_mnist_example_calls_only_horovods_names():
    assert set(re.findall(r"\bhvd\.(\w+)", SCRIPT.read_text())) == HOROVOD
