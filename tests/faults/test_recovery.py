"""A rank dies in a step; torchrun starts all again; the parameters end as if it had not.

One launch for all deaths, which trains once for each: what is slow is the start of processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.processes.commands import ROOT, python

RANKS = 2
STEPS = 12
EVERY = 3
# The rank, and the call that it does not survive: of the loss, or to write the second checkpoint.
DEATHS = [(0, "loss", 7), (1, "write", 2)]


def _launch(directory: Path) -> None:
    python(
        *("-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--max-restarts", str(len(DEATHS))),
        *("--monitor-interval", "0.1", "tests/faults/recovery_job.py"),
        *(directory, str(STEPS), str(EVERY), json.dumps(DEATHS)),
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
    )


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_training_that_loses_a_rank_ends_with_the_same_parameters(tmp_path: Path) -> None:
    _launch(tmp_path)

    start: list[dict[str, torch.Tensor]] = []
    for seed, death in enumerate(DEATHS):
        assert (tmp_path / "killed" / f"died{seed}").exists(), death
        finals = [
            torch.load(tmp_path / how / f"final{seed}.rank{rank}.pt")
            for how in ("killed", "undisturbed")
            for rank in range(RANKS)
        ]
        for final in finals[1:]:
            assert final.keys() == finals[0].keys()
            assert all(torch.equal(final[key], finals[0][key]) for key in final), death
        # Seeds differ, so the comparison is not of something constant.
        assert all(not torch.equal(other["9.weight"], finals[0]["9.weight"]) for other in start)
        start.append(finals[0])
        # One checkpoint is kept, and no half of one.
        kept = sorted(path.name for path in (tmp_path / "killed" / f"seed{seed}").iterdir())
        assert kept == [str(STEPS), "latest"]
