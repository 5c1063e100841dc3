"""Ranks in processes of their own: how they start, what they log then and while they wait."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch

import collectives
from collectives.stall import warning_seconds
from tests.collectives.bootstrap.test_launchers import TORCHRUNS, by
from tests.processes.harness import Kept, run_ranks


def _launched(rank: int) -> list[Any]:
    """What a rank is told under one launcher after the other, and by the group."""
    said = []
    for launcher, local_size in (("srun", 4), ("mpirun", 4), ("srun", 2)):
        for name in TORCHRUNS:
            os.environ.pop(name, None)
        os.environ.update(by(launcher, rank, 4, local_size))
        group = collectives.init(timeout=30.0)
        total = group.all_reduce(torch.tensor([float(rank)])).item()
        said.append([group.rank, group.local_rank, group.local_size, group.num_nodes, total])
        assert os.environ["LOCAL_RANK"] == str(group.local_rank)
        group.barrier()
        collectives.shutdown()
        for name in by(launcher, rank, 4):
            del os.environ[name]
    return said


def test_ranks_of_other_launchers_reduce_where_the_launcher_says() -> None:
    for rank, (*one_host, two_hosts) in enumerate(run_ranks(4, _launched, timeout=90.0)):
        assert one_host == [[rank, rank, 4, 1, 6.0]] * 2
        assert two_hosts == [rank, rank % 2, 2, 2, 6.0]


def _over_gloo(rank: int) -> list[str]:
    kept = Kept()
    logging.getLogger("collectives").addHandler(kept)
    group = collectives.init(timeout=30.0, transport="gloo")
    # From here on, since a start may take long where many ranks start at a time.
    warning_seconds.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        # Longer than a rank that came on time may be kept waiting on a busy machine.
        patched.setenv("ADASUM_STALL_WARNING_SECONDS", "0.5")
        group.barrier()
        kept.said.clear()
        group.barrier("before")
        if rank == 1:
            time.sleep(2.0)
        group.all_reduce(torch.ones(1), name="late")
    collectives.shutdown()
    return [each for each in kept.said if "late" in each]


def test_long_wait_over_gloo_is_warned_of_beside_the_thread_that_waits() -> None:
    waiting, late = run_ranks(2, _over_gloo)
    assert len(waiting) >= 2 and not late
    for said in waiting:
        assert "rank 0 has waited" in said and "for rank 1 in step 0" in said, said
