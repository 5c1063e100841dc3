"""All ranks' pieces on every rank, whatever their lengths."""

from __future__ import annotations

import torch

from collectives.execution.executor import Workspace, execute
from collectives.reducers import Sum
from collectives.schedules import ring
from collectives.transport.base import Transport

__all__ = ["gather_pieces"]


def gather_pieces(
    mine: torch.Tensor, transport: Transport, label: str, timeout: float, workspace: Workspace
) -> tuple[torch.Tensor, list[int]]:
    """Return every rank's 1-D tensor, one after the other, and the boundaries in elements."""
    counts = torch.zeros(transport.size, dtype=torch.int64, device="cpu")
    counts[transport.rank] = mine.numel()

    def run(buffer: torch.Tensor, bounds: list[int]) -> None:
        execute(
            ring.all_gather(transport.size),
            buffer,
            transport,
            Sum,
            label=label,
            timeout=timeout,
            workspace=workspace,
            bounds=bounds,
        )

    run(counts, list(range(transport.size + 1)))
    bounds = [0, *torch.cumsum(counts, 0).tolist()]
    whole = torch.empty(bounds[-1], dtype=mine.dtype, device=mine.device)
    whole[bounds[transport.rank] : bounds[transport.rank + 1]] = mine
    run(whole, bounds)
    return whole, bounds
