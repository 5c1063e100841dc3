"""Ranks agree by messages on what they are about to do before they do it.

One all-reduce of some hundred bytes: the largest and the smallest hash of the descriptions of all
ranks that are at work, and whether any rank has joined. Equal hashes, none joined: go on. Otherwise
the descriptions themselves are gathered, and every rank raises the same error, or knows what the
joined ranks have to take part in.

The same message carries the hashes of the calls that each rank has queued behind: as far as they
are equal, none needs a message of its own.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from collectives.consistency.description import Description, difference
from collectives.errors import CollectiveMismatchError
from collectives.execution.executor import Workspace, execute
from collectives.reducers import Max, Sum
from collectives.schedules import recursive_doubling, ring
from collectives.transport.base import Transport

_NO_CODE = torch.iinfo(torch.int64).min
CODE_BITS = 63
# Queued calls that one message agrees on beside its own.
AHEAD = 15
_CODES = struct.Struct(f"={3 + 2 * AHEAD}q")
_NONE = (0,) * AHEAD
_INTEGERS = torch.empty(0, dtype=torch.int64, device="cpu")


class Joined(NamedTuple):
    """A rank that takes part in the others' calls until all have joined.

    since: the number of the first call that it only joined. operators: the names of the reducers
    that it can carry out. kinds: the calls that it can take part in.
    """

    since: int
    operators: Collection[str]
    kinds: Collection[str]


class Agreed(NamedTuple):
    """joined: the ranks that have joined. last: where all have, the rank that was the last to.
    call: what the others do, told where any has joined. ahead: the number of calls after this one
    that all ranks make alike, too."""

    joined: Sequence[int] = ()
    last: int | None = None
    call: Description | None = None
    ahead: int = 0


_AGREED = Agreed()


def agree(
    mine: Description | Joined,
    transport: Transport,
    label: str,
    timeout: float,
    workspace: Workspace,
    code: int = 0,
    queued: Sequence[int] = (),
) -> Agreed:
    """Return when all ranks that have not joined make one call, or all have joined.

    code: `code_of(mine, CODE_BITS)` of a call. queued: those of the calls after this one, up to
    AHEAD; 0 for what is none.

    Raises CollectiveMismatchError, on every rank with the same text, where the calls differ or the
    joined ranks cannot take part.
    """
    if isinstance(mine, Joined):
        codes = (_NO_CODE, _NO_CODE, mine.since * transport.size + transport.rank + 1)
    else:
        codes = (code, -code, 0)
    # The most of what is given and the least of it, which is the most of its opposite. In memory
    # that is kept: a new tensor costs ten microseconds, and the ranks wait for each other.
    extremes = workspace.within.take(_CODES.size // 8, _INTEGERS)
    words = extremes.numpy().data
    _CODES.pack_into(words, 0, *codes, *_filled(queued), *_filled([-code for code in queued]))
    label = f"the agreement on {label}"
    execute(
        recursive_doubling.all_reduce(transport.size),
        extremes,
        transport,
        Max,
        label=label,
        timeout=timeout,
        workspace=workspace,
    )
    most, least, since, *others = _CODES.unpack_from(words)
    if most == _NO_CODE:
        return Agreed(last=(since - 1) % transport.size)
    if most == -least and not since:
        if not queued:
            return _AGREED
        alike = zip(others[:AHEAD], others[AHEAD:], strict=True)
        same = takewhile(lambda pair: pair[0] == -pair[1] != 0, alike)
        return Agreed(ahead=sum(1 for _ in same))
    said: list[Any]
    if isinstance(mine, Joined):
        said = ["", sorted(mine.operators), sorted(mine.kinds)]
    else:
        said = [mine.to_json()]
    told = gather_bytes(json.dumps(said).encode(), transport, label, timeout, workspace)
    return _verdict([json.loads(other) for other in told])


def _filled(codes: Sequence[int]) -> Sequence[int]:
    """AHEAD codes, with 0 for those that are none."""
    return (*codes, *_NONE[len(codes) :])


def code_of(call: Description, bits: int) -> int:
    """A hash of a call, the same in every process: `bits` bits, up to 64, and not 0."""
    digest = hashlib.blake2b(call.to_json().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits) or 1


def _verdict(said: list[list[Any]]) -> Agreed:
    """What all ranks conclude from what all ranks said."""
    calls = {r: Description.from_json(text) for r, (text, *_) in enumerate(said) if text}
    joined = [rank for rank in range(len(said)) if rank not in calls]
    call = calls[min(calls)]
    if any(other != call for other in calls.values()):
        raise CollectiveMismatchError(difference(calls))
    for rank in joined:
        _, operators, kinds = said[rank]
        what = None
        if call.kind not in kinds:
            what = "cannot be called"
        elif rank in (call.options.get("root"), call.options.get("dst")):
            what = f"needs rank {rank}"
        elif call.options.get("op", operators[0]) not in operators:
            what = f"needs op {call.options['op']}, which join was not given there,"
        if what:
            raise CollectiveMismatchError(f"{call} {what} while rank {rank} has joined")
    return Agreed(joined, call=call)


def gather_bytes(
    payload: bytes, transport: Transport, label: str, timeout: float, workspace: Workspace
) -> list[bytes]:
    """Every rank's bytes, by rank."""
    whole, bounds = gather_pieces(as_tensor(payload), transport, label, timeout, workspace)
    raw = whole.numpy().tobytes()
    return [raw[bounds[r] : bounds[r + 1]] for r in range(transport.size)]


def gather_pieces(
    mine: torch.Tensor, transport: Transport, label: str, timeout: float, workspace: Workspace
) -> tuple[torch.Tensor, list[int]]:
    """Every rank's 1-D tensor, one after the other, and the boundaries in elements."""
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


def as_tensor(payload: bytes) -> torch.Tensor:
    """The bytes, copied: uint8, 1-D, on the CPU."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
