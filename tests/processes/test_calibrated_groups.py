"""Groups that are made of a process group measure link rates, by exactly its ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import collectives
from adasum import Adasum, Average, HookState
from collectives import CollectiveMismatchError, Group
from collectives.bootstrap import calibration
from tests.processes.harness import run_ranks


def _rates(group: Group) -> list[bytes]:
    """What each rank of the group chooses by."""
    return group.all_gather_bytes(repr(group._runner.link_rates).encode())


def _calibrated(rank: int) -> list[int]:
    # Small sizes will do where the numbers themselves are not looked at.
    calibration._SIZES = (64, 4096)  # type: ignore[assignment]
    dist.init_process_group("gloo")
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    counts = []
    # Of these ranks alone: the third goes on meanwhile.
    if rank < 2:
        state = HookState(Average, process_group=pair)
        rates = _rates(state.group)
        assert b"LinkRates" in rates[0]
        # The first use has made it, by its own choice.
        assert collectives.from_process_group(pair, calibrate=False) is state.group
        counts.append(len(set(rates)))
        mine = torch.full((5,), float(rank))
        assert state.group.all_reduce(mine, Average) is mine and mine[0] == 0.5
    if rank > 0:
        state = HookState(Adasum, process_group=other, calibrate=False)
        assert _rates(state.group) == [b"None"] * 2
    whole = collectives.from_process_group(dist.group.WORLD, timeout=30.0)
    counts.append(len(set(_rates(whole))))
    assert whole._runner.link_rates is not None
    dist.destroy_process_group()
    return counts


def test_process_groups_of_hooks_are_calibrated_unless_told_not_to() -> None:
    assert run_ranks(3, _calibrated) == [[1, 1], [1, 1], [1]]


def _differing(rank: int) -> tuple[str, float]:
    dist.init_process_group("gloo")
    with pytest.raises(CollectiveMismatchError) as caught:
        _ = HookState(timeout=20.0, calibrate=rank != 1).group
    # Nothing is left of it.
    group = HookState(timeout=20.0, calibrate=False).group
    return str(caught.value), float(group.all_reduce(torch.ones(1)))


def test_ranks_that_differ_in_calibrate_are_told() -> None:
    said = (
        "ranks disagree: rank 0 calls from_process_group() with calibrate=True, "
        "rank 1 calls from_process_group() with calibrate=False"
    )
    assert run_ranks(3, _differing) == [(said, 3.0)] * 3


def test_calibrate_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="calibrate must be a bool, got str"):
        HookState(calibrate="no")  # type: ignore[arg-type]
