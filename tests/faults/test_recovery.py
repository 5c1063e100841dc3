"""Ranks die in a training; torchrun starts all again; it ends as if they had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.commands import ROOT, python
from tests.processes.harness import run_ranks, script

RANKS, STEPS = 2, 12


def _last(checkpoints: Path) -> list[dict[str, Any]]:
    """Load the last checkpoint, by rank; it is the only one, and no half of one is left."""
    assert sorted(path.name for path in checkpoints.iterdir()) == [str(STEPS), "latest"]
    return [torch.load(checkpoints / str(STEPS) / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_training_that_loses_ranks_ends_with_the_same_parameters_and_states(tmp_path: Path) -> None:
    once, killed = tmp_path / "once", tmp_path / "killed"
    options = ("--steps", str(STEPS), "--every", "3", "--directory")
    run_ranks(RANKS, script, str(ROOT / "examples" / "resume_digits.py"), *options, str(once))
    python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("--max-restarts", str(RANKS), "--monitor-interval", "0.1"),
        *("tests/faults/recovery_job.py", tmp_path, *options, killed),
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )
    # Each died once.
    assert len([*tmp_path.glob("died in a *")]) == RANKS
    torch.testing.assert_close(_last(killed), _last(once), rtol=0, atol=0)
