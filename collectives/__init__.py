"""Collectives over many ranks: all-reduces as schedules over point-to-point messages.

::

    group = collectives.init()              # under torchrun, or one rank
    collectives.all_reduce(tensor)          # in place, op=Sum
    request = group.all_reduce_init(flat)   # planned once, started any number of times
    collectives.run_threads(4, fn)          # four ranks in one process

A `Schedule` is plain data, which `verify` checks for all ranks at once. It runs over any transport
with any `Reducer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from collectives.bucketing import (
    Packing,
    extract_ranges,
    group_devices,
    pack_small_tensors,
    plan_groups,
    split_by_size,
    unpack_small_tensors,
)
from collectives.consistency.requests import Request
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    TransportError,
)
from collectives.fused_buffer import FusedBuffer, buffer_of
from collectives.group import Group
from collectives.initialize import (
    default_group,
    from_process_group,
    group_or_default,
    init,
    is_initialized,
    new_group,
    run_threads,
    shutdown,
)
from collectives.reducers import Average, Operands, Piece, Reducer, Sum
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Action, Schedule, Step, Transfer
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, parse_general_int
from collectives.schedules.topology import Topology, ring_permutations
from collectives.schedules.verify import verify
from collectives.work import Work


def all_reduce(
    tensor: Tensor, op: Reducer = Sum, *, group: Group | None = None, **options: Any
) -> Tensor | Work:
    """`Group.all_reduce` on `group`, or on the default group."""
    return group_or_default(group).all_reduce(tensor, op, **options)


def grouped_all_reduce(
    tensors: Sequence[Tensor], op: Reducer = Sum, *, group: Group | None = None, **options: Any
) -> list[Tensor] | Work:
    """`Group.grouped_all_reduce` on `group`, or on the default group."""
    return group_or_default(group).grouped_all_reduce(tensors, op, **options)


def reduce(
    tensor: Tensor, dst: int = 0, op: Reducer = Sum, *, group: Group | None = None, **options: Any
) -> Tensor | Work:
    """`Group.reduce` on `group`, or on the default group."""
    return group_or_default(group).reduce(tensor, dst, op, **options)


def owners(numels: Sequence[int], *, group: Group | None = None) -> list[int]:
    """`Group.owners` on `group`, or on the default group."""
    return group_or_default(group).owners(numels)


def reduce_to_owners(
    tensors: Sequence[Tensor], op: Reducer = Sum, *, group: Group | None = None, **options: Any
) -> list[int]:
    """`Group.reduce_to_owners` on `group`, or on the default group."""
    return group_or_default(group).reduce_to_owners(tensors, op, **options)


def broadcast_from_owners(
    tensors: Sequence[Tensor], *, group: Group | None = None, **options: Any
) -> list[Tensor]:
    """`Group.broadcast_from_owners` on `group`, or on the default group."""
    return group_or_default(group).broadcast_from_owners(tensors, **options)


def reduce_scatter(
    tensor: Tensor, op: Reducer = Sum, *, group: Group | None = None, **options: Any
) -> Tensor | Work:
    """`Group.reduce_scatter` on `group`, or on the default group."""
    return group_or_default(group).reduce_scatter(tensor, op, **options)


def all_gather(tensor: Tensor, *, group: Group | None = None, **options: Any) -> Tensor | Work:
    """`Group.all_gather` on `group`, or on the default group."""
    return group_or_default(group).all_gather(tensor, **options)


def all_to_all(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    *,
    group: Group | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor] | Work:
    """`Group.all_to_all` on `group`, or on the default group."""
    return group_or_default(group).all_to_all(tensor, splits, **options)


def broadcast(
    tensor: Tensor, root: int = 0, *, group: Group | None = None, **options: Any
) -> Tensor | Work:
    """`Group.broadcast` on `group`, or on the default group."""
    return group_or_default(group).broadcast(tensor, root, **options)


def barrier(*, group: Group | None = None) -> None:
    """`Group.barrier` on `group`, or on the default group."""
    group_or_default(group).barrier()


__all__ = [
    "Action",
    "AllReduceSpec",
    "Average",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "FusedBuffer",
    "Group",
    "Operands",
    "Packing",
    "Piece",
    "Reducer",
    "Request",
    "Schedule",
    "Step",
    "Sum",
    "Topology",
    "Transfer",
    "TransportError",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_from_owners",
    "buffer_of",
    "default_group",
    "extract_ranges",
    "from_process_group",
    "group_devices",
    "grouped_all_reduce",
    "init",
    "is_initialized",
    "new_group",
    "owners",
    "pack_small_tensors",
    "parse_all_reduce_spec",
    "parse_general_int",
    "plan_groups",
    "reduce",
    "reduce_scatter",
    "reduce_to_owners",
    "ring_permutations",
    "run_threads",
    "shutdown",
    "split_bounds",
    "split_by_size",
    "unpack_small_tensors",
    "verify",
]
