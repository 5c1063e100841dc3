"""Ranks of which one has no compiled CPU kernels: all compute by torch's functions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import pytest
import torch

import adasum
import collectives
import kernels
from tests.multi_rank.harness import run_ranks


def _reduce(rank: int, lacking: Sequence[int]) -> tuple[str, list[str], bytes]:
    os.environ["ADASUM_CPU_KERNELS"] = "torch" if rank in lacking else "auto"
    kernels._native._state = kernels._native._State()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group = collectives.init(timeout=30.0)
    # Of a length at which the two ways add in other orders.
    mine = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    reduced = group.all_reduce(mine, op=adasum.Adasum, algorithm="rd")
    collectives.shutdown()
    said = [str(warning.message) for warning in seen if "by torch's functions" in str(warning)]
    return kernels.cpu_path(), said, reduced.numpy().tobytes()


@pytest.mark.parametrize("lacking", [(), (1,), (0, 1, 2)])
def test_all_ranks_compute_alike(lacking: tuple[int, ...]) -> None:
    if kernels.cpu_path() != "compiled":
        pytest.skip(f"no compiled CPU path: {kernels.cpu_path()}")
    told = run_ranks(3, _reduce, lacking)
    paths, said, reduced = zip(*told, strict=True)
    asked = "torch: ADASUM_CPU_KERNELS=torch"
    assert len(set(reduced)) == 1
    if lacking == (1,):
        assert paths == (f"torch: rank 1 has {asked}",) * 3
        assert [len(each) for each in said] == [0, 1, 0]
        assert said[1][0].endswith(f"as ranks [1] have to: rank 1 has {asked}")
    else:
        assert set(paths) == {asked if lacking else "compiled"}
        assert said == ([], [], [])
