"""Gather every rank's bytes on all ranks, for reports at start-up and about mismatches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.errors import TransportError
from collectives.transport.base import Message, Transport

# The most that a rank may report: the description of a call of a million tensors is smaller. A
# larger length is taken for a broken message, before memory is allocated for it.
_MAX_BYTES = 1 << 26


def as_tensor(payload: bytes) -> torch.Tensor:
    """Copy the bytes to a 1-D uint8 tensor on the CPU."""
    return torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))


def gather_bytes(
    payload: bytes,
    transport: Transport,
    step: str,
    timeout: float,
    ranks: Sequence[int] | None = None,
) -> list[bytes]:
    """Return every rank's bytes, by rank; lengths may differ. A collective.

    ranks: Those of the transport that take part, in the order of the result; all unless given.

    It takes about log2 n rounds. A rank knows the bytes of itself and of the ranks that follow it,
    and in each round their number doubles. So messages go to and from 2 log2 n ranks only, which
    are the neighbours.
    """
    members = range(transport.size) if ranks is None else ranks
    rank, size = members.index(transport.rank), len(members)
    known = [payload]
    while (distance := len(known)) < size:
        count = min(distance, size - distance)
        peer, target = members[(rank + distance) % size], members[(rank - distance) % size]

        def swap(
            mine: torch.Tensor,
            theirs: torch.Tensor,
            what: str,
            peer: int = peer,
            target: int = target,
        ) -> None:
            sends, recvs = [Message(target, mine)], [Message(peer, theirs)]
            transport.exchange(sends, recvs, f"{step} ({what})", timeout)

        lengths = torch.empty(count, dtype=torch.int64, device="cpu")
        swap(torch.tensor([len(each) for each in known[:count]], device="cpu"), lengths, "lengths")
        for number, length in enumerate(lengths.tolist()):
            if not 0 <= length <= _MAX_BYTES:
                name = transport.name(members[(rank + distance + number) % size])
                raise TransportError(
                    f"{step}: rank {name} says that it sends {length} bytes, which is not from 0 "
                    f"to {_MAX_BYTES}"
                )
        theirs = torch.empty(int(lengths.sum()), dtype=torch.uint8, device="cpu")
        swap(as_tensor(b"".join(known[:count])), theirs, "contents")
        known += [each.numpy().tobytes() for each in theirs.split(lengths.tolist())]
    return [known[(each - rank) % size] for each in range(size)]


def gather_objects(
    value: Any, transport: Transport, timeout: float, ranks: Sequence[int] | None = None
) -> list[Any]:
    """Return the values of all ranks, or of some, at start-up: `gather_bytes`. They are JSON."""
    payload = json.dumps(value).encode()
    return read_objects(
        gather_bytes(payload, transport, "start-up", timeout, ranks), transport, ranks
    )


def read_objects(
    reports: Sequence[bytes], transport: Transport, ranks: Sequence[int] | None = None
) -> list[Any]:
    """Decode what ranks have sent as JSON, by rank; a TransportError names one that sent none."""
    read = []
    for rank, each in zip(ranks or range(transport.size), reports, strict=True):
        try:
            read.append(json.loads(each))
        except (ValueError, RecursionError) as error:
            raise TransportError(
                f"what rank {transport.name(rank)} sent is not what a rank sends: {error}"
            ) from None
    return read
