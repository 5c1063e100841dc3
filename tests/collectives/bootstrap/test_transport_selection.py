"""What a choice of transport demands, and what an error says where that cannot be had."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import TransportError
from collectives.bootstrap.transport_selection import _check_demand, connect
from collectives.calls import Call
from collectives.transport import GlooTransport, NcclTransport


def test_demand_that_is_not_met_names_the_ranks_and_the_fix() -> None:
    nothing: list[list[object]] = [[[], [], ""]] * 3
    tcp = [[[], [1, 2], ""], [[2], [0, 2], ""], [[1], [0, 1], ""]]
    short = [*nothing[:2], [[], [], "it needs 9 file descriptors"]]
    for choice in ("auto", "gloo", "nccl"):
        _check_demand(choice, tcp)
        _check_demand(choice, short)
    for choice in ("tcp", "shm"):
        _check_demand(choice, nothing)
    words = re.escape("rank 1 has no connection to ranks [2]")
    with pytest.raises(TransportError, match=words + '.*GLOO_SOCKET_IFNAME.*"auto"'):
        _check_demand("tcp", tcp)
    words = re.escape("rank 0 shares no memory with ranks [1, 2]")
    with pytest.raises(TransportError, match=words + '.*"auto"'):
        _check_demand("shm", tcp)
    for choice in ("tcp", "shm"):
        with pytest.raises(TransportError, match=f'"{choice}": rank 2: it needs 9 file'):
            _check_demand(choice, short)


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
