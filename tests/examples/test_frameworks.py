"""The examples for other frameworks, between two processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes.commands import ran
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


def run(*command: str, seconds: float = 150) -> str:
    """Return what a command prints, which ends in time and without an error."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLES.parent),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "1",
            "HF_HUB_OFFLINE": "1",
            # No token is left in the home folder.
            "RAY_AUTH_MODE": "disabled",
        },
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        # torchrun takes its ranks with it when asked to end; killed, it leaves them behind.
        process.terminate()
        process.wait(15)
    assert process.returncode == 0, errors
    return out


def on_two_ranks(script: str, *options: str) -> str:
    """Run an example under torchrun itself, of whose variables frameworks read more than ranks."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run(*launch, str(EXAMPLES / script), *options, *TRAIN)


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-recipes installs it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "options"), [("lightning", ("--devices", "2")), ("accelerate", ())]
)
def test_framework_examples_train_by_the_chosen_op(package: str, options: tuple[str, ...]) -> None:
    require(package)
    check_lines(on_two_ranks(f"{package}_digits.py", *options))


@pytest.mark.recipe
def test_compiled_model_in_ddp_trains_by_the_chosen_op() -> None:
    check_lines(on_two_ranks("compile_digits.py"))


@pytest.mark.slow
def test_compiled_model_with_the_optimizer_trains_by_the_chosen_op() -> None:
    printed = on_two_ranks("compile_digits.py", "--by", "optimizer")
    own, average, adasum = (float(norm) for _, _, norm in LINE.findall(printed))
    # Graphs that end where DDP's buckets do round otherwise than one of the whole model, by some
    # eps each of 88 steps.
    assert average == pytest.approx(own, rel=88 * torch.finfo(torch.float32).eps)
    assert adasum > 1.05 * average


@pytest.mark.recipe
def test_transformers_example_trains_by_the_chosen_op() -> None:
    require("transformers")
    lines = LINE.findall(on_two_ranks("transformers_digits.py"))
    assert [op for op, *_ in lines] == ["own", "average", "adasum"]
    # AdamW takes steps of nearly one length whatever the gradient's: no norm is larger.
    assert lines[0][1] == lines[1][1] != lines[2][1]


@pytest.mark.recipe
@pytest.mark.timeout(420)
def test_ray_example_trains_by_the_chosen_op() -> None:
    require("ray")
    check_lines(run(str(EXAMPLES / "ray_digits.py"), *TRAIN, seconds=400))


@pytest.mark.slow
def test_fsdp2_example_with_ranks_not_divided_by_shards_raises() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = ran(sys.executable, EXAMPLES / "fsdp2_digits.py", **alone)
    assert done.returncode != 0
    assert "1 ranks are no multiple of --shards 2" in done.stderr
