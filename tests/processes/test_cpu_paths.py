"""Ranks of which one has no compiled CPU kernels: all compute by torch's functions."""

from __future__ import annotations

import logging
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
from tests.processes.harness import Kept, run_ranks

ASKED = "ADASUM_CPU_KERNELS=torch"


def need_compiled() -> None:
    if kernels.backend_info().cpu_path != "compiled":
        pytest.skip(f"no compiled CPU path: {kernels.backend_info().cpu_path}")


def _reduce(rank: int, lacking: Sequence[int]) -> tuple[str, list[str], bytes]:
    os.environ["ADASUM_CPU_KERNELS"] = "torch" if rank in lacking else "auto"
    dispatch._state.clear()
    kept = Kept()
    logging.getLogger("collectives").addHandler(kept)
    group = collectives.init(timeout=30.0)
    # Of a length at which the two kinds add in other orders.
    mine = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    reduced = group.all_reduce(mine, op=adasum.Adasum, algorithm="rd")
    collectives.shutdown()
    return kernels.backend_info().cpu_path, kept.said, reduced.numpy().tobytes()


def _later(rank: int) -> tuple[str, str, list[bytes]]:
    """Ranks 0, 1 and 2 are compiled and meet; then rank 2 meets rank 3, which is not."""
    os.environ["ADASUM_CPU_KERNELS"] = "torch" if rank == 3 else "auto"
    dispatch._state.clear()
    dist.init_process_group("gloo")
    first, second = dist.new_group([0, 1, 2]), dist.new_group([2, 3])
    group = collectives.from_process_group(first, timeout=30.0) if rank < 3 else None
    said = ""
    if rank >= 2:
        try:
            collectives.from_process_group(second, timeout=30.0)
        except collectives.TransportError as error:
            said = str(error)
    seeds = torch.Generator().manual_seed(rank)
    mine = [torch.randn(100_003, generator=seeds, dtype=torch.float64) for _ in range(4)]
    sums = [group.all_reduce(each, op=adasum.Adasum, algorithm="rd") for each in mine if group]
    dist.destroy_process_group()
    return kernels.backend_info().cpu_path, said, [each.numpy().tobytes() for each in sums]


def test_a_later_group_changes_no_earlier_ones_bits() -> None:
    need_compiled()
    told = run_ranks(4, _later)
    assert [path for path, _, _ in told] == ["compiled"] * 3 + [f"torch: {ASKED}"]
    assert told[0][2] == told[1][2] == told[2][2] and len(told[0][2]) == 4
    words = f"ranks [0] compute on CPU tensors in compiled code, as other groups of theirs do, and \
ranks [1] cannot: rank 1 has torch: {ASKED}; set ADASUM_CPU_KERNELS=torch on all ranks"
    assert [said for _, said, _ in told] == ["", "", words, words]


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
def test_all_ranks_compute_alike(lacking: tuple[int, ...]) -> None:
    need_compiled()
    told = run_ranks(3, _reduce, lacking)
    paths, said, reduced = zip(*told, strict=True)
    assert len(set(reduced)) == 1
    if lacking == (1,):
        assert paths == (f"torch: rank 1 has torch: {ASKED}",) * 3
        assert [len(each) for each in said] == [0, 1, 0]
        assert said[1][0].endswith(f"as ranks [1] have to: rank 1 has torch: {ASKED}")
    else:
        assert set(paths) == {f"torch: {ASKED}" if lacking else "compiled"}
        assert said == ([], [], [])
