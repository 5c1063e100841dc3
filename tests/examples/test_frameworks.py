"""The examples for other frameworks, between two processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.harness import run_ranks, script

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = ("--epochs", "1", "--op", "own", "average", "adasum")
LINE = re.compile(r"^(\w+): (test accuracy [\d.]+, norm of the parameters ([\d.]+))$", re.M)


def check_lines(printed: str) -> None:
    lines = {op: (line, float(norm)) for op, line, norm in LINE.findall(printed)}
    assert list(lines) == ["own", "average", "adasum"], printed
    # Halving is exact and two terms have one sum: two ranks' average has the same bits either way.
    assert lines["average"] == lines["own"]
    # Where the two gradients disagree Adasum steps further, by up to a factor of 2.
    assert lines["adasum"][1] > 1.05 * lines["average"][1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("ddp_digits.py",), id="ddp"),
        pytest.param(("fsdp2_digits.py", "--shards", "1"), marks=pytest.mark.slow, id="fsdp2"),
    ],
)
def test_ddp_and_fsdp_examples_train_by_the_chosen_op(options: tuple[str, ...]) -> None:
    name, *rest = options
    check_lines(run_ranks(2, script, str(EXAMPLES / name), *rest, *TRAIN)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "options"), [("lightning", ("--devices", "2")), ("accelerate", ())]
)
def test_framework_examples_train_by_the_chosen_op(package: str, options: tuple[str, ...]) -> None:
    """Under torchrun itself, because they read more of its variables than ranks."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", str(EXAMPLES / f"{package}_digits.py")]
    process = subprocess.Popen(
        [*launch, *options, *TRAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
    )
    try:
        out, errors = process.communicate(timeout=150)
    finally:
        # torchrun takes its ranks with it when asked to end; killed, it leaves them behind.
        process.terminate()
        process.wait(15)
    assert process.returncode == 0, errors
    check_lines(out)


@pytest.mark.slow
def test_fsdp2_example_with_ranks_not_divided_by_shards_raises() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fsdp2_digits.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **alone},
    )
    assert done.returncode != 0
    assert "1 ranks are no multiple of --shards 2" in done.stderr
