"""All-reduces that a library does whole: torch.distributed's (`collective`) and NCCL's (`nccl`).

Everything else in this package moves messages by schedules; these two are here to be compared with,
and to be the inner level of a two-level reduction.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from collectives.errors import CollectiveTimeoutError
from collectives.schedules.partition import split_bounds
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.transport.nccl.pending import Posted, arrives
from collectives.transport.nccl.torch_nccl import behind
from collectives.transport.process_groups import (
    abort_nccl,
    extend_timeout,
    first_line,
    leave,
    subgroup,
)


class Libraries:
    """The libraries that one group's transport has at hand, over all ranks or over this node's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process_group: dist.ProcessGroup | None = transport.process_group
        self._of_node: dist.ProcessGroup | None = None

    def check(self, name: str, device: torch.device) -> None:
        """Raise ValueError, before anything is sent, where `name` cannot sum on `device`."""
        if name == "nccl":
            if device.type != "cuda":
                raise ValueError(
                    f"algorithm 'nccl' needs CUDA tensors, got one on {device}: use 'collective'"
                )
            if not self._transport.sums_on_gpu:
                raise ValueError(
                    "algorithm 'nccl' needs a group over NCCL: call init with one GPU a rank, "
                    "or use 'collective'"
                )
        elif self._process_group is None:
            raise ValueError(
                "algorithm 'collective' is torch.distributed's own all_reduce, and this group "
                "(one process) has no process group: use 'xring', 'rechd' or 'rd'"
            )

    def all_reduce(
        self,
        name: str,
        flat: torch.Tensor,
        shards: int,
        topology: Topology | None,
        step: str,
        timeout: float,
    ) -> None:
        """Sum `flat` in place in `shards` pieces that are under way at once.

        topology: where given, over the ranks of this rank's node alone.
        """
        ranks = None
        if topology is not None:
            ranks = tuple(topology.ranks_of(topology.node_of(self._transport.rank)))
        bounds = split_bounds(flat.numel(), shards)
        pieces = [flat[low:high] for low, high in pairwise(bounds) if low < high]
        if name == "nccl":
            for piece in pieces:
                self._transport.all_reduce(piece, ranks, step, timeout)
            return
        group = self._process_group if ranks is None else self._node_group(ranks, timeout)
        start, late = time.monotonic(), False
        try:
            works: list[Any] = [
                dist.all_reduce(piece, group=group, async_op=True) for piece in pieces
            ]
            if flat.is_cuda:
                event = behind(works, flat.device)
                late = event is not None and not arrives(Posted(event, (), step, timeout), start)
            else:
                for work in works:
                    work.wait(timedelta(seconds=max(start + timeout - time.monotonic(), 1e-3)))
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"rank {self._transport.rank}: torch.distributed's all_reduce in {step} failed or "
                f"took over {timeout:g} s: {first_line(error)}"
            ) from error
        if late:
            assert group is not None
            raise CollectiveTimeoutError(
                f"rank {self._transport.rank}: torch.distributed's all_reduce in {step} took over "
                f"{timeout:g} s: {abort_nccl(group)}"
            )

    def close(self) -> None:
        """Leave the process group of this node."""
        if self._of_node is not None:
            leave(self._of_node)
            self._of_node = None

    def _node_group(self, ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
        """The process group of this node, made by its ranks together at the first use."""
        if self._of_node is None:
            assert self._process_group is not None
            backend = dist.get_backend_config(self._process_group)
            self._of_node = subgroup(self._process_group, ranks, backend, timeout)
            extend_timeout(self._of_node)
        return self._of_node
