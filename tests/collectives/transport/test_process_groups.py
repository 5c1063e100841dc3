"""Process groups of some ranks: made by these alone, whatever the default group is bound to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from collectives.transport.process_groups import subgroup

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_no_communicator_is_split_off_a_world_that_is_bound_to_a_device(
    world: dist.ProcessGroup, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by init_process_group(device_id=): ranks outside of the new group would have to come."""
    world.bound_device_id = DEVICE  # type: ignore[attr-defined]

    def split_source(group: dist.ProcessGroup) -> None:
        raise AssertionError("torch would split the default group's communicator")

    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", split_source)
    # What this test relies on: torch's own way asks.
    with pytest.raises(AssertionError, match="would split"):
        dist.new_group([0])
    if fails:
        with pytest.raises(AssertionError, match="NO_SUCH_BACKEND"):
            subgroup(world, [0], "cpu:no_such_backend", 5.0)
    else:
        made = subgroup(world, [0], "gloo", 5.0)
        assert dist.get_process_group_ranks(made) == [0]
        assert made.bound_device_id is None  # type: ignore[attr-defined]
    assert world.bound_device_id == DEVICE  # type: ignore[attr-defined]
