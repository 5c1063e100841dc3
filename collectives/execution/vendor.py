"""All-reduces that a library does whole: torch.distributed's (`collective`) and NCCL's (`nccl`).

Everything else in this package moves messages by schedules; these two are here to be compared with,
and to be the inner level of a two-level reduction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.execution.context import CallContext
from collectives.schedules.partition import split_bounds
from collectives.transport.base import Transport
from collectives.transport.nccl.cupy_backend import DTYPES
from collectives.transport.process_groups import (
    extend_timeout,
    first_line,
    has_nccl,
    leave,
    subgroup,
)


class Libraries:
    """The libraries that one group's transport has at hand, over all ranks or over this node's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process_group: dist.ProcessGroup | None = transport.process_group
        self._of_node: dist.ProcessGroup | None = None

    def check(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Raise, before anything is sent, where `name` cannot sum such tensors."""
        if dtype.to_real() not in DTYPES:
            raise TypeError(
                f"algorithm {name!r} is a library's own sum, which cannot add {dtype}: "
                "use 'xring', 'rechd' or 'rd', or convert"
            )
        if name == "nccl":
            if device.type != "cuda":
                raise ValueError(
                    f"algorithm 'nccl' needs CUDA tensors, got one on {device}: use 'collective'"
                )
            if not self._transport.sums_on_gpu:
                raise ValueError(
                    "algorithm 'nccl' needs a group over NCCL of its own: call init with "
                    "transport='nccl' and one GPU a rank, or use 'collective'"
                )
        elif self._process_group is None:
            raise ValueError(
                "algorithm 'collective' is torch.distributed's own all_reduce, and this group "
                "(one process) has no process group: use 'xring', 'rechd' or 'rd'"
            )

    def all_reduce(
        self,
        name: str,
        shards: int,
        flat: torch.Tensor,
        ranks: tuple[int, ...] | None,
        call: CallContext,
    ) -> None:
        """Sum `flat` in place by the library `name` in `shards` pieces, all under way at once.

        ranks: those of this rank's node, to sum over these alone; all ranks for None.
        """
        # No piece is empty, however many are asked for.
        bounds = split_bounds(flat.numel(), max(1, min(shards, flat.numel())))
        pieces = [flat[low:high] for low, high in pairwise(bounds) if low < high]
        if name != "nccl":
            self._all_reduce_by_torch(pieces, flat.device, ranks, call)
            return
        for piece in pieces:
            self._transport.all_reduce(piece, ranks, call.label, call.timeout)

    def _all_reduce_by_torch(
        self,
        pieces: Sequence[torch.Tensor],
        device: torch.device,
        ranks: tuple[int, ...] | None,
        call: CallContext,
    ) -> None:
        group = self._process_group if ranks is None else self._node_group(ranks, call.timeout)
        where = f"{self._transport.me}: torch.distributed's all_reduce in {call.label}"
        start = time.monotonic()
        assert group is not None
        if device.type == "cuda" and has_nccl(group):
            for piece in pieces:
                self._transport.all_reduce(piece, group, call.label, call.timeout)
            return
        try:
            works: list[Any] = [
                dist.all_reduce(piece, group=group, async_op=True) for piece in pieces
            ]
            for work in works:
                left = max(start + call.timeout - time.monotonic(), 1e-3)
                work.wait(timedelta(seconds=left))
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"{where} failed or took over {call.timeout:g} s: {first_line(error)}"
            ) from error

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
