"""Ranks agree on what they are about to do before they do it.

One 16-byte all-reduce: the largest and the smallest hash of all ranks' descriptions. Equal: go on.
Otherwise the descriptions themselves are gathered, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from .algorithms import doubling, ring
from .errors import CollectiveMismatchError
from .executor import Workspace, execute
from .reducers import Max, Sum
from .transport.base import Transport


def agree(
    entries: Sequence[str], transport: Transport, label: str, timeout: float, workspace: Workspace
) -> None:
    """Return when all ranks gave the same `entries`; raise CollectiveMismatchError otherwise."""
    text = json.dumps(list(entries))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    code = int.from_bytes(digest, "little") >> 1
    extremes = torch.tensor([code, -code])
    label = f"the agreement on {label}"
    execute(
        doubling.all_reduce(transport.size),
        extremes,
        transport,
        Max,
        label=label,
        timeout=timeout,
        workspace=workspace,
    )
    if extremes[0] == -extremes[1]:
        return
    texts = gather_bytes(text.encode(), transport, label, timeout, workspace)
    raise CollectiveMismatchError(_difference([json.loads(other) for other in texts]))


def gather_bytes(
    payload: bytes, transport: Transport, label: str, timeout: float, workspace: Workspace
) -> list[bytes]:
    """Every rank's bytes, by rank."""
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else _no_bytes()
    whole, bounds = gather_pieces(mine, transport, label, timeout, workspace)
    raw = whole.numpy().tobytes()
    return [raw[bounds[r] : bounds[r + 1]] for r in range(transport.size)]


def gather_pieces(
    mine: torch.Tensor, transport: Transport, label: str, timeout: float, workspace: Workspace
) -> tuple[torch.Tensor, list[int]]:
    """Every rank's 1-D tensor, one after the other, and the boundaries in elements."""
    counts = torch.zeros(transport.size, dtype=torch.int64)
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


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _difference(calls: list[list[str]]) -> str:
    """The first difference from rank 0, the same text on every rank."""
    first = calls[0]
    rank = next(r for r, entries in enumerate(calls) if entries != first)
    other = calls[rank]
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            return (
                f"ranks disagree: rank 0 calls {first[0]} with {mine}, "
                f"rank {rank} calls {other[0]} with {theirs}"
            )
    return (
        f"ranks disagree: rank 0 calls {first[0]} with {len(first) - 1} entries, "
        f"rank {rank} with {len(other) - 1} entries"
    )
