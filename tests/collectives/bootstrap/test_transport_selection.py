"""What a choice of transport demands, and what an error says where that cannot be had."""

from __future__ import annotations

import re

import pytest

from collectives import TransportError
from collectives.bootstrap.transport_selection import _check_demand


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
