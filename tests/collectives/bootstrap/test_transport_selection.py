"""What a choice of transport demands, and what an error says where that cannot be had."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from collectives import CollectiveMismatchError, TransportError
from collectives.bootstrap.transport_selection import _check_shared, connect, version
from collectives.calls import Call
from collectives.transport import GlooTransport, NcclTransport, ThreadWorld
from tests.collectives.transport.thread_ranks import together


def test_shared_memory_that_cannot_be_had_names_the_ranks_and_the_fix() -> None:
    _check_shared([[0, 1], [0, 1]])
    words = re.escape("rank 1 shares no memory with ranks [0, 2]")
    with pytest.raises(TransportError, match=words + '.*"auto"'):
        _check_shared([[0, 1, 2], [1], [0, 1, 2]])


def test_ranks_of_other_versions_are_told_so_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadWorld(3)

    def start(rank: int) -> str:
        said = version() if rank != 1 else "0.0.1 (deadbeef)"
        call = Call("init", options={"version": said, "transport": "auto"}, label="start-up")
        with pytest.raises(CollectiveMismatchError) as caught:
            connect(cast(Any, world.transport(rank)), 20.0, call)
        return str(caught.value)

    (text,) = {*together(*(lambda rank=rank: start(rank) for rank in range(3)))}
    assert "rank 1 calls init() with version=0.0.1 (deadbeef)" in text and version() in text


@pytest.mark.parametrize("config", ["cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_cuda_tensors_travel_over_torchs_nccl_where_the_process_group_has_it(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    process_group: Any = object()
    gloo = GlooTransport(process_group)
    found = connect(gloo, 20.0, Call("init", options={"transport": "auto"}, label="start-up"))
    if config == "cpu:gloo":
        assert found is gloo
        with pytest.raises(ValueError, match=r"tensor is on cuda:0, .*cpu:gloo,cuda:nccl"):
            found.check_device(torch.device("cuda", 0))
        return
    assert isinstance(found, NcclTransport) and found.process_group is process_group
    found.check_device(torch.device("cuda", 1))
    assert not found.sums_on_gpu and found.device is None
