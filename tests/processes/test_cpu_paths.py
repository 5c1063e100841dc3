"""Ranks of which some have no compiled CPU kernels: all compute alike, or none starts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import adasum
import collectives
import kernels
from kernels.cpu import dispatch, native
from tests.processes.harness import run_ranks

ASKED = "ADASUM_CPU_KERNELS=torch"


def need_compiled() -> None:
    if kernels.backend_info().cpu_path != "compiled":
        pytest.skip(f"no compiled CPU path: {kernels.backend_info().cpu_path}")


def _reduce(rank: int, lacking: Sequence[int]) -> tuple[str, str, bytes]:
    os.environ["ADASUM_CPU_KERNELS"] = "torch" if rank in lacking else "auto"
    dispatch._state.clear()
    try:
        group = collectives.init(timeout=30.0)
    except collectives.TransportError as error:
        return kernels.backend_info().cpu_path, str(error), b""
    # Of a length at which the two kinds add in other orders.
    mine = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    reduced = group.all_reduce(mine, op=adasum.Adasum, algorithm="rd")
    collectives.shutdown()
    return kernels.backend_info().cpu_path, "", reduced.numpy().tobytes()


def _demand(rank: int) -> str:
    os.environ["ADASUM_CPU_KERNELS"] = "native" if rank else "auto"
    native.LIBRARY = Path("no such file")
    dispatch._state.clear()
    dist.init_process_group("gloo")
    begin = time.monotonic()
    try:
        collectives.from_process_group(dist.group.WORLD, timeout=1.5)
    except (RuntimeError, ValueError) as error:
        assert time.monotonic() - begin < (1.0 if rank else 6.5)
        return str(error)
    return ""


def test_what_cannot_be_had_is_said_before_anybody_waits() -> None:
    first, second = run_ranks(2, _demand)
    assert "ADASUM_CPU_KERNELS=native: the C kernels were not compiled" in second
    # Rank 1 is not there.
    assert "rank 0 could not start: rank 1 did not come within" in first


@pytest.mark.parametrize("lacking", [(), (1,), (0, 1, 2)])
def test_all_ranks_compute_alike_or_none_starts(lacking: tuple[int, ...]) -> None:
    need_compiled()
    told = run_ranks(3, _reduce, lacking)
    paths, said, reduced = zip(*told, strict=True)
    assert len(set(reduced)) == len(set(said)) == 1
    assert [path == "compiled" for path in paths] == [rank not in lacking for rank in range(3)]
    if lacking == (1,):
        assert said[0].startswith("ranks [1] cannot compute on CPU tensors in compiled code, as ")
        assert f"rank 1 has torch: {ASKED}; install" in said[0]
    else:
        assert said[0] == "" and reduced[0]
