"""Phases of an all-reduce: the schedules and library calls for a range of the specification string.

A library, torch.distributed (`collective`) or NCCL (`nccl`), does an all-reduce in one call, while
schedules move messages. Libraries serve as a comparison, and as the inner level of a two-level
reduction.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.execution.executor import CallContext
from collectives.reducers import Needs, Reducer, is_plain_sum
from collectives.schedules.algorithm import ONE_TENSOR, Algorithm, RoundRobin, refusal
from collectives.schedules.auto import sum_algorithm, tree_algorithm
from collectives.schedules.levels import schedule_of
from collectives.schedules.registry import algorithm, carriers
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.transport.nccl.cupy_backend import DTYPES
from collectives.transport.process_groups import (
    extend_timeout,
    first_line,
    has_nccl,
    leave,
    subgroup,
)


def auto_of(
    op: Reducer, device: str, nbytes: int, topology: Topology, library: str | None = None
) -> AllReduceSpec:
    """Return the algorithm of `auto` by messages; arguments as of `sum_algorithm`."""
    ordered = op.needs is Needs.BALANCED_TREE
    if ordered or is_plain_sum(op):
        return sum_algorithm(device, nbytes, topology, library, ordered=ordered)
    if op.reads_tree and type(op).algorithm is Reducer.algorithm:
        return tree_algorithm(device, nbytes, topology.size)
    return parse_all_reduce_spec(op.algorithm(nbytes, topology.size))[0]


def for_dtype(spec: AllReduceSpec, op: Reducer, dtype: torch.dtype) -> AllReduceSpec:
    """Return the algorithm for a dtype: the pairwise one if `op` reads no trees of this dtype."""
    pairwise = algorithm(spec.outer).pairwise
    if pairwise is None or op.reads_tree_of(dtype):
        return spec
    return replace(spec, alg=f"{spec.inner}/{pairwise}" if spec.inner else pairwise)


@dataclass(frozen=True)
class AllReducePhases:
    """The phases of one all-reduce: a library's all-reduce, or a schedule, or both in this order.

    Attributes:
        library: The library's name.
        shards: The number of pieces that the library reduces at the same time.
        schedule: The schedule. After a library it reduces only across the nodes.
        two_levels: Whether the schedule's phase 0 sums inside nodes and its phase 1 uses the
            operator.
        prescale: The factor of every rank's contribution.
        host: Whether the schedule works in host memory.
    """

    library: str | None = None
    shards: int = 1
    schedule: Schedule | None = None
    two_levels: bool = False
    prescale: float = 1.0
    host: bool = False


def phases_of(
    spec: AllReduceSpec, op: Reducer, topology: Topology, round_robin: RoundRobin = ONE_TENSOR
) -> AllReducePhases:
    """Return how to reduce with `op` by `spec` (not auto) on `topology`.

    On two levels an operator that needs one tree (Adasum) runs only across nodes: inside each node
    its operands are averaged, by a factor before the sum, so that float16 cannot overflow.

    Raises:
        ValueError: The algorithm takes fewer shards, or cannot carry the operator.
    """
    if spec.is_round_robin:
        # Reduce the numbers to the distinct placements, since each schedule is kept.
        size = topology.size
        round_robin = RoundRobin(min(round_robin.tensors, size), round_robin.first % size)
    else:
        round_robin = ONE_TENSOR
    # Not the operator itself, which may have no hash and would be kept alive by the cache.
    traits = op.needs, op.reads_tree, is_plain_sum(op), str(op)
    return _phases_of(spec, *traits, topology, round_robin)


def require_carrier(specification: str, op: Reducer) -> None:
    """Raise ValueError if an algorithm cannot carry `op`, whatever the ranks; a group checks more.

    For options that are made before there are ranks.
    """
    for spec in parse_all_reduce_spec(specification):
        if spec.outer != "auto":
            phases_of(replace(spec, shards=1, inner_shards=1), op, Topology(4, 4))


@lru_cache(maxsize=1024)
def _phases_of(
    spec: AllReduceSpec,
    needs: Needs,
    reads_tree: bool,
    is_sum: bool,
    op: str,
    topology: Topology,
    round_robin: RoundRobin,
) -> AllReducePhases:
    outer, inner = algorithm(spec.outer), algorithm(spec.inner) if spec.inner else None
    able, one_tree = ", ".join(carriers(needs, reads_tree)), Needs.ONE_TREE in needs
    if outer.is_library and inner is None:
        if not is_sum:
            raise ValueError(
                f"algorithm {outer.name!r} is a library's own sum, which cannot do {op}: use {able}"
            )
        return AllReducePhases(outer.name, spec.shards)
    carrier = outer if inner is None else _of_two_levels(inner, outer, topology)
    if reason := refusal(carrier, needs, reads_tree, op=op, size=topology.size):
        raise ValueError(f"algorithm {str(spec)!r} {reason}: use {able}")
    if inner is not None and not (is_sum or needs):
        raise ValueError(
            f"algorithm {str(spec)!r} sums inside the nodes, which cannot do {op}: "
            f"use {outer.name!r} for all ranks"
        )
    schedule = schedule_of(spec, topology, one_tree=one_tree, round_robin=round_robin)
    if inner is None:
        return AllReducePhases(schedule=schedule, host=outer.on_host)
    return AllReducePhases(
        inner.name if inner.is_library else None,
        spec.inner_shards,
        schedule,
        two_levels=True,
        prescale=1.0 / topology.local_size if one_tree else 1.0,
        host=outer.on_host or inner.on_host,
    )


def _of_two_levels(inner: Algorithm, outer: Algorithm, topology: Topology) -> Algorithm:
    """Return a copy of `outer` with the needs that both levels together meet."""
    local = topology.local_size
    meets = outer.meets & ~Needs.ALL_OPERANDS
    # Nodes of 1, 2, 4, ... ranks are branches of the balanced tree.
    if Needs.BALANCED_TREE not in inner.meets or (topology.num_nodes > 1 and local & (local - 1)):
        meets &= ~Needs.BALANCED_TREE
    return replace(outer, meets=meets)


class Libraries:
    """The libraries of one group's transport, over all ranks or over this node's ranks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._of_node: dist.ProcessGroup | None = None

    def check(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Raise, before any message is sent, if `name` cannot sum such tensors."""
        if dtype.to_real() not in DTYPES:
            raise TypeError(
                f"algorithm {name!r} is a library's own sum, which cannot add {dtype}: "
                "use 'xring', 'rechd' or 'rd', or convert"
            )
        if name != "nccl" and self._transport.process_group is None:
            raise ValueError(
                "algorithm 'collective' is torch.distributed's own all_reduce, and this group "
                "(one process) has no process group: use 'xring', 'rechd' or 'rd'"
            )
        if name == "nccl" and device.type != "cuda":
            raise ValueError(
                f"algorithm 'nccl' needs CUDA tensors, got one on {device}: use 'collective'"
            )
        if name == "nccl" and not self._transport.sums_on_gpu:
            raise ValueError(
                "algorithm 'nccl' needs a group with its own NCCL communicator: call init with "
                "transport='nccl' and one GPU per rank, or use 'collective'"
            )

    def all_reduce(
        self,
        name: str,
        shards: int,
        flat: torch.Tensor,
        ranks: tuple[int, ...] | None,
        call: CallContext,
    ) -> None:
        """Sum `flat` in place by the library `name`, in `shards` pieces at the same time.

        ranks: The ranks of this rank's node, to sum over these only; None for all ranks.
        """
        # At most one piece per element, so that none is empty.
        bounds = split_bounds(flat.numel(), max(1, min(shards, flat.numel())))
        pieces = [flat[low:high] for low, high in pairwise(bounds) if low < high]
        among: Any = ranks
        if name != "nccl":
            among = self.group(ranks, call.timeout)
            if flat.device.type != "cuda" or not has_nccl(among):
                self._all_reduce_on_host(pieces, among, call)
                return
        for piece in pieces:
            self._transport.all_reduce(piece, among, call.label, call.timeout)

    def _all_reduce_on_host(
        self, pieces: list[torch.Tensor], group: dist.ProcessGroup, call: CallContext
    ) -> None:
        end = time.monotonic() + call.timeout
        try:
            works: list[Any] = [
                dist.all_reduce(each, group=group, async_op=True) for each in pieces
            ]
            for work in works:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"{self._transport.me}: torch.distributed's all_reduce in {call.label} failed or "
                f"took over {call.timeout:g} s: {first_line(error)}"
            ) from error

    def group(self, ranks: tuple[int, ...] | None, timeout: float) -> dist.ProcessGroup | None:
        """Return the process group of all ranks, or of this node, whose ranks make it together.

        None if this group has no process group of all ranks.
        """
        whole = self._transport.process_group
        if whole is None or ranks is None or len(ranks) == self._transport.size:
            return whole
        if self._of_node is None:
            self._of_node = subgroup(whole, ranks, dist.get_backend_config(whole), timeout)
            extend_timeout(self._of_node)
        return self._of_node

    def close(self) -> None:
        """Leave the process group of this node."""
        if self._of_node is not None:
            leave(self._of_node)
            self._of_node = None
