"""A rank dies at a random step; torchrun starts all again; the parameters end as if it had not.

One launch for all seeds, which trains one after the other and loses a rank in each: what is slow is
the start of processes. ADASUM_RECOVERY_SEEDS sets their number.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
RANKS = 2
STEPS = 12
EVERY = 3
# 12 starts of two processes take too long for every run of the suite.
SEEDS = int(os.environ.get("ADASUM_RECOVERY_SEEDS", "2"))


def _launch(directory: Path, deaths: list[Any]) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), "--max-restarts", str(len(deaths))),
            *("--monitor-interval", "0.1", "tests/faults/recovery_job.py"),
            *(str(directory), str(STEPS), str(EVERY), json.dumps(deaths)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60 + 20 * len(deaths),
    )
    assert done.returncode == 0, done.stderr[-6000:]


def _death(seed: int) -> list[Any]:
    """A rank, and the call that it does not survive."""
    random_ = random.Random(seed)
    rank = random_.randrange(RANKS)
    if seed % 4 == 3:
        # The second or third checkpoint; rank 0 writes two files for each.
        return [rank, "write", random_.randint(2, 3) * (2 if rank == 0 else 1)]
    return [rank, "loss", random_.randint(1, STEPS)]


@pytest.mark.timeout(120 + 30 * SEEDS)
@pytest.mark.slow
def test_training_that_loses_a_rank_ends_with_the_same_parameters(tmp_path: Path) -> None:
    deaths = [_death(seed) for seed in range(SEEDS)]
    _launch(tmp_path, deaths)

    start: list[dict[str, torch.Tensor]] = []
    for seed in range(SEEDS):
        assert (tmp_path / "killed" / f"died{seed}").exists(), deaths[seed]
        finals = [
            torch.load(tmp_path / how / f"final{seed}.rank{rank}.pt")
            for how in ("killed", "undisturbed")
            for rank in range(RANKS)
        ]
        for final in finals[1:]:
            assert final.keys() == finals[0].keys()
            assert all(torch.equal(final[key], finals[0][key]) for key in final), deaths[seed]
        # Seeds differ, so the comparison is not of something constant.
        assert all(not torch.equal(other["9.weight"], finals[0]["9.weight"]) for other in start)
        start.append(finals[0])
        # One checkpoint is kept, and no half of one.
        kept = sorted(path.name for path in (tmp_path / "killed" / f"seed{seed}").iterdir())
        assert kept == [str(STEPS), "latest"]
