"""Start-up, join and barriers, and the numbers of ranks and hosts; Horovod's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import collectives
from adasum.horovod.arguments import require
from adasum.horovod.process_sets import ProcessSet, add_process_set, require_group
from adasum.reducer import UNWEIGHTED, Adasum
from collectives import default_group
from collectives.bootstrap.transport_selection import TransportName

_logger = logging.getLogger(__name__)
_looked_for_variables = False


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    timeout: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    transport: TransportName | None = None,
) -> None:
    """Connect the ranks that a launcher started; without one, this process is the only rank.

    A second call does not connect again; its arguments must equal the first call's.

    Args:
        comm: For compatibility with Horovod; must be None.
        process_sets: Process sets to add, the same on every rank; a second call adds new ones.
            Sets can always be added later, so Horovod's "dynamic" changes nothing.
        timeout: Seconds that each step of a collective may wait for a peer; 300 by default.
        process_group: The torch.distributed process group whose ranks to use.
        transport: How tensors travel, as in `collectives.init`: "auto", "gloo", "nccl" and others.

    Raises:
        NotImplementedError: `comm` was given.
        ValueError: `process_sets` is a string other than "dynamic", or a second call passes other
            arguments than the first.

    Examples:
        >>> hvd.init()  # without a launcher it is one rank
        >>> hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
        (0, 1, 0, 1)
        >>> hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
        (0, 1, True)
    """
    if comm is not None:
        raise NotImplementedError(
            "comm is not supported: ranks are those that torchrun, mpirun or srun started"
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'process_sets must be a list of sets or "dynamic", got {process_sets!r}')
    if process_sets is not None:
        require("process_sets", process_sets, Sequence)
    collectives.init(timeout=timeout, process_group=process_group, transport=transport)
    _report_ignored_variables()
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def _report_ignored_variables() -> None:
    """Warn once, on rank 0, of Horovod's environment variables that are set but have no effect."""
    global _looked_for_variables
    if _looked_for_variables or default_group().rank != 0:
        return
    _looked_for_variables = True
    # `init` reads ranks and sizes from these, which horovodrun sets for every rank.
    used = {f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    ignored = sorted({name for name in os.environ if name.startswith("HOROVOD_")} - used)
    if ignored:
        _logger.warning("environment variables of Horovod have no effect: %s", ", ".join(ignored))


def join(device: int = -1) -> int:
    """Wait until every rank has joined; return the rank that joined last.

    Call it when this rank has run out of data. Until the others join too, it takes part in their
    calls (except broadcasts from it) with zeros, Adasum's identity. Averages still divide by the
    number of all ranks; allgather gets no rows from this one. Afterwards the ranks' models differ:
    broadcast the model of the rank that joined last. The time between two calls of the other ranks
    must not exceed the timeout.

    Args:
        device: The GPU for the zeros that stand for CUDA tensors; -1 is the current GPU.

    Examples:
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    require("device", device, int)
    zeros_on = None if device < 0 else torch.device("cuda", device)
    return default_group().join([Adasum, UNWEIGHTED], device=zeros_on)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank of the process set has called it.

    Examples:
        >>> hvd.init()
        >>> hvd.barrier()
    """
    require_group(process_set).barrier()


def rank() -> int:
    """Return this rank's number, 0 to size() - 1."""
    return default_group().rank


def size() -> int:
    """Return the number of ranks."""
    return default_group().size


def local_rank() -> int:
    """Return this rank's number on its host, 0 to local_size() - 1."""
    return default_group().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return default_group().local_size


def cross_rank() -> int:
    """Return this host's number among the hosts with more than local_rank() ranks."""
    group = default_group()
    return _hosts_with(group.hosts, group.local_rank).index(group.hosts[group.rank])


def cross_size() -> int:
    """Return the number of hosts with more than local_rank() ranks."""
    group = default_group()
    return len(_hosts_with(group.hosts, group.local_rank))


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    hosts = default_group().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts_with(hosts: Sequence[int], local_rank: int) -> list[int]:
    """Return the hosts that have this local rank, ordered by their first ranks."""
    return [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]
