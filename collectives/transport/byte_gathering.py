"""Every rank's bytes on every rank: for what ranks tell each other at start-up and on errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import TransportError
from collectives.transport.base import Message, Transport

# Of what ranks tell each other: a call of a million tensors takes less.
_MAX_BYTES = 1 << 26


def as_tensor(payload: bytes) -> torch.Tensor:
    """Copy the bytes to a 1-D uint8 tensor on the CPU."""
    return torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))


def gather_bytes(payload: bytes, transport: Transport, step: str, timeout: float) -> list[bytes]:
    """Return every rank's bytes, by rank; lengths may differ.

    Args:
        payload: This rank's.
        transport: Between the ranks, all of which call this.
        step: What an error calls this.
        timeout: Seconds, for the lengths and for the bytes.
    """
    peers = [rank for rank in range(transport.size) if rank != transport.rank]

    def gather(tensors: Sequence[torch.Tensor], what: str) -> None:
        mine = tensors[transport.rank]
        transport.exchange(
            [Message(peer, mine) for peer in peers],
            [Message(peer, tensors[peer]) for peer in peers],
            f"{step} ({what})",
            timeout,
        )

    lengths = torch.full((transport.size, 1), len(payload), device="cpu")
    gather([*lengths], "lengths")
    announced = lengths.flatten().tolist()
    for peer, length in enumerate(announced):
        if not 0 <= length <= _MAX_BYTES:
            raise TransportError(
                f"{step}: rank {transport.name(peer)} says that it sends {length} bytes, which is "
                f"not from 0 to {_MAX_BYTES}"
            )
    payloads = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in announced]
    payloads[transport.rank] = as_tensor(payload)
    gather(payloads, "contents")
    return [each.numpy().tobytes() for each in payloads]


def gather_objects(value: Any, transport: Transport, timeout: float) -> list[Any]:
    """Return what every rank gives at start-up, by rank; it travels as JSON."""
    return read_objects(
        gather_bytes(json.dumps(value).encode(), transport, "start-up", timeout), transport
    )


def read_objects(payloads: Sequence[bytes], transport: Transport) -> list[Any]:
    """Return what ranks have sent as JSON, by rank.

    Raises:
        TransportError: It is none; the text names the rank.
    """
    read = []
    for rank, each in enumerate(payloads):
        try:
            read.append(json.loads(each))
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"what rank {transport.name(rank)} told is not what a rank tells: {error}"
            ) from None
    return read
