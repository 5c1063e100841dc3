"""All-reduces that a library does whole: torch.distributed's (`collective`) and NCCL's (`nccl`).

The other algorithms move messages by schedules; these two are here to be compared with, and to be
the inner level of a two-level reduction.
"""

from __future__ import annotations

import time
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
    """The libraries that one group's transport has, over all ranks or over this node's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._of_node: dist.ProcessGroup | None = None

    def check(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Raise, before anything is sent, if `name` cannot sum such tensors."""
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
                "algorithm 'nccl' needs a group over NCCL of its own: call init with "
                "transport='nccl' and one GPU a rank, or use 'collective'"
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

        ranks: The ranks of this rank's node, to sum over these only; None for all ranks.
        """
        # No piece is empty, however many are asked for.
        bounds = split_bounds(flat.numel(), max(1, min(shards, flat.numel())))
        pieces = [flat[low:high] for low, high in pairwise(bounds) if low < high]
        among: Any = ranks
        if name != "nccl":
            among = self._group(ranks, call.timeout)
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

    def _group(self, ranks: tuple[int, ...] | None, timeout: float) -> dist.ProcessGroup:
        """Return the process group of all ranks, or of this node: its ranks make that together."""
        whole = self._transport.process_group
        assert whole is not None
        if ranks is None:
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
