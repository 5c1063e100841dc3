"""The Horovod script of examples/, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_docs import horovods_names
from tests.processes.harness import run_ranks, script

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_mnist.py"


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
    called = set(re.findall(r"\bhvd\.(\w+)", SCRIPT.read_text()))
    assert "Adasum" in called and called <= horovods_names().keys()
