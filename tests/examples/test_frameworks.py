"""The scripts for other frameworks run as they stand, between two real processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "ddp_digits.py": ("torch", []),
    "fsdp2_digits.py": ("torch", ["--shards", "1"]),
    "lightning_digits.py": ("lightning", ["--devices", "2"]),
    "accelerate_digits.py": ("accelerate", []),
}
LINE = re.compile(r"^(\w+): (test accuracy [\d.]+, norm of the parameters ([\d.]+))$", re.M)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_trains_by_the_chosen_operation(script: str) -> None:
    package, options = SCRIPTS[script]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", str(ROOT / "examples" / script), *options]
    process = subprocess.Popen(
        [*launch, "--epochs", "1", "--op", "own", "average", "adasum"],
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
    lines = {op: (line, float(norm)) for op, line, norm in LINE.findall(out)}
    assert list(lines) == ["own", "average", "adasum"], out
    # Halving is exact and two terms have one sum: two ranks' average has the same bits either way.
    assert lines["average"] == lines["own"]
    # Where the two gradients disagree Adasum steps further, by up to a factor of 2.
    assert lines["adasum"][1] > 1.05 * lines["average"][1]


def test_fsdp2_ranks_that_shards_do_not_divide_are_named() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fsdp2_digits.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **alone},
    )
    assert done.returncode != 0
    assert "1 ranks are no multiple of --shards 2" in done.stderr
