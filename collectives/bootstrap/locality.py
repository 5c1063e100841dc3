"""Locality: the host of each rank; all ranks get the same answer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from collectives.schedules.topology import Topology
from collectives.transport.base import Transport, gather_objects


@dataclass(frozen=True)
class Locality:
    """The host of one rank, and of all others.

    Attributes:
        local_rank: The rank's number among the ranks of its host.
        local_size: The number of ranks on its host.
        hosts: By rank, a number for its host; the same on all ranks.
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
    """Find this rank's locality: from local ranks if all ranks have one, otherwise host names.

    A collective of all ranks, unless the last three arguments are given. All ranks find the same
    hosts; algorithms see the nodes of `topology`, by default the hosts.
    """
    rank, size = transport.rank, transport.size
    given = local_rank is not None and local_size is not None
    if size == 1:
        return Locality(0, 1, (0,), topology or Topology(1, 1))
    if given and topology is not None:
        hosts = tuple(topology.node_of(r) for r in range(size))
        return Locality(local_rank or 0, local_size or 1, hosts, topology)
    mine = (local_rank, local_size) if given else (None, None)
    reports = gather_objects([os.uname().nodename, *mine], transport, timeout)
    names = [name for name, *_ in reports]
    # Local ranks are more reliable than host names: containers may have the same name, and tests
    # may simulate several nodes on one machine. Names still help to group the ranks; without them
    # ("") the local ranks must fill the nodes by themselves.
    for labels in (names, [""] * size):
        filled = _filled(labels, [(local, of) for _, local, of in reports])
        if filled is not None:
            return replace(locality_on(filled, rank, topology), local_rank=local_rank or 0)
    # Local ranks are missing or do not fill nodes: several launchers started the ranks.
    return locality_on([names.index(name) for name in names], rank, topology)


def locality_on(hosts: Sequence[int], rank: int, topology: Topology | None = None) -> Locality:
    """Return the locality of `rank`, given the host of each rank."""
    host = hosts[rank]
    found = topology or _topology_of(hosts)
    return Locality(hosts[:rank].count(host), hosts.count(host), tuple(hosts), found)


def _filled(
    labels: Sequence[str], local_ranks: Sequence[tuple[int | None, int | None]]
) -> list[int] | None:
    """Return the node of each rank, or None if any node misses a local rank.

    The k-th rank with the same label, local size and local rank is on the k-th node with this label
    and size.
    """
    seen: Counter[tuple[str, int, int]] = Counter()
    nodes = []
    for label, (local, of) in zip(labels, local_ranks, strict=True):
        if local is None or of is None:
            return None
        nodes.append((label, of, seen[label, of, local]))
        seen[label, of, local] += 1
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    full = all(nodes.count(node) == node[1] for node in numbers)
    return [numbers[node] for node in nodes] if full else None


def _topology_of(hosts: Sequence[int]) -> Topology:
    """Return the nodes that algorithms see: the hosts, if these are equal runs of ranks.

    Otherwise each rank is its own node, and `uneven` has the hosts.
    """
    size, local_size = len(hosts), hosts.count(hosts[0])
    nodes = {host: tuple(r for r, other in enumerate(hosts) if other == host) for host in hosts}
    runs = [tuple(range(at, at + local_size)) for at in range(0, size, local_size)]
    if list(nodes.values()) == runs:
        return Topology(size, local_size)
    return Topology(size, 1, uneven=tuple(nodes.values()))
