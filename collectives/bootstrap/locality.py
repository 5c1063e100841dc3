"""Locality: which host each rank is on, the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    A collective of all ranks, unless all is given. What is found is one partition of the ranks, the
    same on all of them.

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
    local_ranks = [(local, of) for _, local, of in reports]
    # Local ranks say more than names: containers may share a name, and a test's nodes a machine.
    for labels in (names, [""] * size):
        filled = _filled(labels, local_ranks)
        if filled is not None:
            found = locality_on(filled, rank, topology)
            return replace(found, local_rank=local_ranks[rank][0])
    # A rank has none, or they fill no nodes: not all ranks were started by one launcher.
    return locality_on([names.index(name) for name in names], rank, topology)


def locality_on(hosts: Sequence[int], rank: int, topology: Topology | None = None) -> Locality:
    """Return the locality of `rank` where the ranks are on these hosts."""
    host = hosts[rank]
    found = topology or _topology_of(hosts)
    return Locality(hosts[:rank].count(host), hosts.count(host), tuple(hosts), found)


def _filled(
    labels: Sequence[str], local_ranks: Sequence[tuple[int | None, int | None]]
) -> list[int] | None:
    """Return each rank's node where the ranks of each label fill nodes; None where they do not.

    A rank joins the first node of its label and its local size that lacks its local rank.
    """
    nodes: list[tuple[str, int, set[int]]] = []
    hosts: list[int] = []
    for label, (local, of) in zip(labels, local_ranks, strict=True):
        if local is None or of is None:
            return None
        fitting = (
            number
            for number, (name, size, members) in enumerate(nodes)
            if (name, size) == (label, of) and local not in members
        )
        number = next(fitting, len(nodes))
        if number == len(nodes):
            nodes.append((label, of, set()))
        nodes[number][2].add(local)
        hosts.append(number)
    return hosts if all(len(members) == size for _, size, members in nodes) else None


def _topology_of(hosts: Sequence[int]) -> Topology:
    """Return the nodes that algorithms see.

    One rank a node where the hosts do not hold equal runs of consecutive ranks.
    """
    size, local_size = len(hosts), hosts.count(hosts[0])
    nodes = {host: tuple(r for r, other in enumerate(hosts) if other == host) for host in hosts}
    runs = [tuple(range(at, at + local_size)) for at in range(0, size, local_size)]
    if list(nodes.values()) == runs:
        return Topology(size, local_size)
    return Topology(size, 1, uneven=tuple(nodes.values()))
