"""Data-parallel training of PyTorch models with sum, average or Adasum.

`import adasum as hvd` runs a Horovod PyTorch script: the names and their meaning are Horovod's.
"""

from __future__ import annotations

from typing import Any

import collectives
from adasum import orthogonality
from adasum.compression import Compression
from adasum.gradients import OptimizerOrderError
from adasum.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from adasum.optimizer import DistributedOptimizer
from adasum.reducer import Adasum, AdasumReducer
from adasum.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from collectives import (
    Average,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Sum,
    TransportError,
    is_initialized,
    shutdown,
)

__all__ = [
    "Adasum",
    "AdasumReducer",
    "Average",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedOptimizer",
    "OptimizerOrderError",
    "Sum",
    "TransportError",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "orthogonality",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]


def init(comm: None = None, process_sets: None = None, **options: Any) -> None:
    """Joins the ranks that torchrun started, or stands alone; a second call does nothing.

    options: timeout (seconds, 300.0) and process_group, as `collectives.init` takes them.
    NotImplementedError for Horovod's comm and process_sets.
    """
    if comm is not None:
        raise NotImplementedError("comm is not supported: ranks are started by torchrun")
    if process_sets is not None:
        raise NotImplementedError("process_sets are not supported yet")
    if not is_initialized():
        collectives.init(**options)


def rank() -> int:
    """This rank's number, 0..size()-1."""
    return collectives.default_group().rank


def size() -> int:
    """The number of ranks."""
    return collectives.default_group().size


def local_rank() -> int:
    """This rank's number on its host, 0..local_size()-1."""
    return collectives.default_group().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return collectives.default_group().local_size
