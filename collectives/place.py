"""Which host each rank is on, as all ranks agree on it at start-up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .agreement import gather_bytes
from .executor import Workspace
from .topology import Topology
from .transport.base import Transport


@dataclass(frozen=True)
class Place:
    """Where one rank is, and which ranks share a host.

    hosts: a number for every rank's host, the same on all ranks. topology: the nodes that
    algorithms see.
    """

    local_rank: int
    local_size: int
    hosts: tuple[int, ...]
    topology: Topology


def find_place(
    transport: Transport,
    timeout: float,
    local_rank: int | None = None,
    local_size: int | None = None,
    topology: Topology | None = None,
) -> Place:
    """This rank's place: by the local ranks where every rank gives them, else by the hosts' names.

    A collective, unless all is given. topology: as the hosts are unless given.
    """
    rank, size = transport.rank, transport.size
    given = local_rank is not None and local_size is not None
    if size == 1:
        return Place(0, 1, (0,), topology or Topology(1, 1))
    if given and topology is not None:
        hosts = tuple(topology.node_of(r) for r in range(size))
        return Place(local_rank or 0, local_size or 1, hosts, topology)
    mine = [os.uname().nodename, local_rank if given else None, local_size if given else None]
    data = json.dumps(mine).encode()
    told = [
        json.loads(text) for text in gather_bytes(data, transport, "start-up", timeout, Workspace())
    ]
    names = [name for name, *_ in told]
    by_name = place_of([names.index(name) for name in names], rank, topology)
    if any(local is None for _, local, _ in told):
        return by_name
    places = [(local, of) for _, local, of in told]
    nodes = _topology_of(places)
    equal = nodes.local_size == places[0][1]
    hosts = tuple(map(nodes.node_of, range(size))) if equal else by_name.hosts
    return Place(*places[rank], hosts, topology or nodes)


def place_of(hosts: Sequence[int], rank: int, topology: Topology | None = None) -> Place:
    """The place of `rank` where the ranks are on these hosts."""
    places = [(hosts[:r].count(host), hosts.count(host)) for r, host in enumerate(hosts)]
    return Place(*places[rank], tuple(hosts), topology or _topology_of(places))


def _topology_of(places: Sequence[tuple[int, int]]) -> Topology:
    """Nodes from every rank's (local rank, local size); one rank a node where they are not equal
    runs of consecutive ranks."""
    size, local_size = len(places), places[0][1]
    equal = size % local_size == 0 and all(
        place == (rank % local_size, local_size) for rank, place in enumerate(places)
    )
    return Topology(size, local_size if equal else 1)
