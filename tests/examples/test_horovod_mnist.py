"""The Horovod script of examples/, on two ranks under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "rank",
    "size",
}


@pytest.mark.parametrize("option", ["--use-adasum", "--fp16-allreduce"])
def test_it_trains(option):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(SCRIPT), "--epochs", "5", option),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(each) for each in re.findall(r"Accuracy: ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 5
    # Guessing gives 10 %.
    assert accuracies[-1] > 60


def test_it_calls_nothing_that_horovod_lacks():
    assert set(re.findall(r"\bhvd\.(\w+)", SCRIPT.read_text())) == HOROVOD
