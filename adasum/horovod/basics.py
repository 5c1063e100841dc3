"""Start-up, and who and where this rank is; Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import collectives
from adasum.horovod.handles import require
from adasum.horovod.process_sets import ProcessSet, add_process_set
from adasum.reducer import Adasum
from collectives import default_group, is_initialized

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    **options: Any,
) -> None:
    """Joins the ranks that torchrun started, or stands alone; a second call does not join again.

    process_sets: sets to add, the same on every rank. Sets may be added later in any case, which is
    what Horovod's process_sets="dynamic" asks for. options: timeout (seconds, 300.0),
    process_group and the others of `collectives.init`. NotImplementedError for Horovod's comm.
    """
    if comm is not None:
        raise NotImplementedError("comm is not supported: ranks are started by torchrun")
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of sets or "dynamic", not {process_sets!r}')
    if process_sets is not None:
        require("process_sets", process_sets, Sequence)
    if not is_initialized():
        collectives.init(**options)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def join(device: int = -1) -> int:
    """Waits until every rank has joined; returns the rank that was the last to.

    For a rank that has run out of data: it takes part in what the others still call (all but
    broadcasts from it) with zeros, Adasum's identity; averages are still over all ranks, and
    allgather gets no rows from it. After it the ranks' models differ: broadcast the last rank's. No
    more than the timeout may pass between two calls of the others.

    device: the GPU on which zeros for CUDA tensors are made; the current one for -1.
    """
    require("device", device, int)
    place = None if device < 0 else torch.device("cuda", device)
    return default_group().join([Adasum], device=place)


def rank() -> int:
    """This rank's number, 0..size()-1."""
    return default_group().rank


def size() -> int:
    """The number of ranks."""
    return default_group().size


def local_rank() -> int:
    """This rank's number on its host, 0..local_size()-1."""
    return default_group().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return default_group().local_size


def cross_rank() -> int:
    """This host's number among those that have a rank with this rank's local_rank()."""
    group = default_group()
    here = group.hosts[group.rank]
    return _peers(group.hosts, group.local_rank).index(here)


def cross_size() -> int:
    """The number of hosts that have a rank with this rank's local_rank()."""
    group = default_group()
    return len(_peers(group.hosts, group.local_rank))


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    hosts = default_group().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _peers(hosts: Sequence[int], local_rank: int) -> list[int]:
    """The hosts that have more ranks than `local_rank`, in the order of their first ranks."""
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
