"""Which host and GPU each rank is on, as all ranks agree on it at start-up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from collectives.bootstrap import nvlink
from collectives.bootstrap.ring_order import MOST_RANKS, ring_order
from collectives.execution.executor import Workspace
from collectives.execution.gathering import gather_bytes
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport


@dataclass(frozen=True)
class Place:
    """Where one rank is, and which ranks share a host.

    hosts: a number for every rank's host, the same on all ranks. topology: the nodes that
    algorithms see. gpus: every rank's GPU by UUID, None where it uses none; empty where not asked.
    """

    local_rank: int
    local_size: int
    hosts: tuple[int, ...]
    topology: Topology
    gpus: tuple[str | None, ...] = ()


def find_place(
    transport: Transport,
    timeout: float,
    local_rank: int | None = None,
    local_size: int | None = None,
    topology: Topology | None = None,
) -> Place:
    """This rank's place: by the local ranks where every rank gives them, else by the hosts' names.

    A collective, unless all is given. topology: as the hosts are unless given, and along the links
    of the GPUs.
    """
    rank, size = transport.rank, transport.size
    given = local_rank is not None and local_size is not None
    if size == 1:
        return Place(0, 1, (0,), topology or Topology(1, 1))
    if given and topology is not None:
        hosts = tuple(topology.node_of(r) for r in range(size))
        return Place(local_rank or 0, local_size or 1, hosts, topology)
    mine = [
        os.uname().nodename,
        local_rank if given else None,
        local_size if given else None,
        nvlink.gpu_of(transport) if topology is None else None,
    ]
    told = _tell(mine, transport, timeout)
    names = [name for name, *_ in told]
    gpus = tuple(gpu for *_, gpu in told)
    place = place_of([names.index(name) for name in names], rank, topology, gpus)
    if all(local is not None for _, local, *_ in told):
        places = [(local, of) for _, local, of, _ in told]
        nodes = _topology_of(places)
        equal = nodes.local_size == places[0][1]
        hosts = tuple(map(nodes.node_of, range(size))) if equal else place.hosts
        place = Place(*places[rank], hosts, topology or nodes, gpus)
    return along_links(place, transport, timeout)


def along_links(place: Place, transport: Transport, timeout: float) -> Place:
    """The place, with the local order of its GPUs' links where that is known and the same on all
    nodes.

    A collective where every rank uses a GPU and nodes are so large that the order matters.
    """
    topology, gpus, rank = place.topology, place.gpus, transport.rank
    if not gpus or None in gpus or not 3 < topology.local_size <= MOST_RANKS:
        return place
    order: tuple[int, ...] = ()
    if topology.local_rank_of(rank) == 0:
        node = topology.ranks_of(topology.node_of(rank))
        order = ring_order(nvlink.speeds_between([str(gpus[r]) for r in node]) or ())
    orders = _tell(order, transport, timeout)[:: topology.local_size]
    if any(other != orders[0] for other in orders):
        return place
    return replace(place, topology=replace(topology, local_order=tuple(orders[0])))


def _tell(mine: Any, transport: Transport, timeout: float) -> list[Any]:
    """What every rank has to say, by rank."""
    data = json.dumps(mine).encode()
    return [
        json.loads(text) for text in gather_bytes(data, transport, "start-up", timeout, Workspace())
    ]


def place_of(
    hosts: Sequence[int],
    rank: int,
    topology: Topology | None = None,
    gpus: Sequence[str | None] = (),
) -> Place:
    """The place of `rank` where the ranks are on these hosts, in natural order unless given."""
    places = [(hosts[:r].count(host), hosts.count(host)) for r, host in enumerate(hosts)]
    return Place(*places[rank], tuple(hosts), topology or _topology_of(places), tuple(gpus))


def _topology_of(places: Sequence[tuple[int, int]]) -> Topology:
    """Nodes from every rank's (local rank, local size); one rank a node where they are not equal
    runs of consecutive ranks."""
    size, local_size = len(places), places[0][1]
    equal = size % local_size == 0 and all(
        place == (rank % local_size, local_size) for rank, place in enumerate(places)
    )
    return Topology(size, local_size if equal else 1)
