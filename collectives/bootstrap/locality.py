"""Locality: which host each rank is on, the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.transport.byte_gathering import gather_objects


@dataclass(frozen=True)
class Locality:
    """Where one rank is, and which ranks share a host.

    Attributes:
        local_rank: The rank's number among those of its host.
        local_size: How many ranks its host has.
        hosts: A number for every rank's host, the same on all ranks.
        topology: The nodes that algorithms see.
    """

    local_rank: int
    local_size: int
    hosts: tuple[int, ...]
    topology: Topology


def find_locality(
    transport: Transport,
    timeout: float,
    local_rank: int | None = None,
    local_size: int | None = None,
    topology: Topology | None = None,
) -> Locality:
    """Find this rank's locality: by the local ranks, where every rank gives them, else by hosts.

    A collective of all ranks, unless all is given.

    Args:
        transport: Between the ranks.
        timeout: Seconds that a peer may take.
        local_rank: This rank's number on its host, where it is known.
        local_size: How many ranks its host has, where that is known.
        topology: What algorithms are to see; the hosts unless given.
    """
    rank, size = transport.rank, transport.size
    given = local_rank is not None and local_size is not None
    if size == 1:
        return Locality(0, 1, (0,), topology or Topology(1, 1))
    if given and topology is not None:
        hosts = tuple(topology.node_of(r) for r in range(size))
        return Locality(local_rank or 0, local_size or 1, hosts, topology)
    mine = [os.uname().nodename, *((local_rank, local_size) if given else (None, None))]
    reports = gather_objects(mine, transport, timeout)
    names = [name for name, *_ in reports]
    locality = locality_on([names.index(name) for name in names], rank, topology)
    if any(local is None for _, local, _ in reports):
        return locality
    local_ranks = [(local, of) for _, local, of in reports]
    nodes = _topology_of(local_ranks)
    hosts = locality.hosts
    if nodes.local_size == local_ranks[0][1]:
        hosts = tuple(map(nodes.node_of, range(size)))
    return Locality(*local_ranks[rank], hosts, topology or nodes)


def locality_on(hosts: Sequence[int], rank: int, topology: Topology | None = None) -> Locality:
    """Return the locality of `rank` where the ranks are on these hosts."""
    local_ranks = [(hosts[:r].count(host), hosts.count(host)) for r, host in enumerate(hosts)]
    return Locality(*local_ranks[rank], tuple(hosts), topology or _topology_of(local_ranks))


def _topology_of(local_ranks: Sequence[tuple[int, int]]) -> Topology:
    """Return the nodes, from every rank's (local rank, local size).

    One rank a node where the nodes are not equal runs of consecutive ranks.
    """
    size, local_size = len(local_ranks), local_ranks[0][1]
    equal = size % local_size == 0 and all(
        each == (rank % local_size, local_size) for rank, each in enumerate(local_ranks)
    )
    return Topology(size, local_size if equal else 1)
