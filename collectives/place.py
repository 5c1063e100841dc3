"""Which host each rank is on, as all ranks agree on it at start-up."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .agreement import gather_bytes
from .executor import Workspace
from .topology import Topology
from .transport.base import Transport


def find_place(
    transport: Transport, timeout: float, topology: Topology | None
) -> tuple[int, int, Topology]:
    """This rank's place on its host, by the hosts' names, and the topology unless given."""
    if transport.size == 1:
        return 0, 1, topology or Topology(1, 1)
    host = os.uname().nodename.encode()
    hosts = gather_bytes(host, transport, "start-up", timeout, Workspace())
    same = [rank for rank, other in enumerate(hosts) if other == host]
    places = [(hosts[:rank].count(other), hosts.count(other)) for rank, other in enumerate(hosts)]
    return same.index(transport.rank), len(same), topology or _topology_of(places)


def agreed_topology(
    transport: Transport, timeout: float, local_rank: int, local_size: int
) -> Topology:
    """The topology of all ranks' places: with another one a rank would leave the others waiting."""
    if transport.size == 1:
        return Topology(1, 1)
    place = f"{local_rank} {local_size}".encode()
    places = gather_bytes(place, transport, "start-up", timeout, Workspace())
    return _topology_of([tuple(map(int, text.split())) for text in places])


def _topology_of(places: Sequence[tuple[int, ...]]) -> Topology:
    """Nodes from every rank's (local rank, local size); one rank a node where they are not equal
    runs of consecutive ranks."""
    size, local_size = len(places), places[0][1]
    equal = size % local_size == 0 and all(
        place == (rank % local_size, local_size) for rank, place in enumerate(places)
    )
    return Topology(size, local_size if equal else 1)
