"""What a call of a collective is, as ranks tell each other: plain data that JSON carries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from collectives import validation
from collectives.reducers import Reducer, Sum
from collectives.schedules.schedule import Schedule
from collectives.transport.base import Transport
from collectives.transport.shared_memory.symmetric_memory import CODE_BITS

ANY = -1


class TensorDescription(NamedTuple):
    """A tensor without its values. ANY as the first dimension: ranks may differ in it."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        shape = str(self.shape).replace(str(ANY), "any", 1)
        return f"shape {shape} {self.dtype} {self.device}"

    def zeros(self, device: torch.device | None = None) -> torch.Tensor:
        """Make such a tensor of zeros, with no rows for ANY; a CUDA tensor on `device`."""
        shape = [0 if n == ANY else n for n in self.shape]
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        where = device if device is not None and self.device == device.type else self.device
        return torch.zeros(shape, dtype=dtype, device=where)


def describe_tensor(tensor: torch.Tensor, *, any_rows: bool = False) -> TensorDescription:
    """Describe `tensor`; with `any_rows` other ranks may have another first dimension."""
    shape = (ANY, *tensor.shape[1:]) if any_rows else tuple(tensor.shape)
    return TensorDescription(shape, str(tensor.dtype), tensor.device.type)


@dataclass(frozen=True)
class Description:
    """A call as all ranks must make it.

    Attributes:
        kind: The collective that is called.
        name: The user's name for the call.
        options: Every other argument that ranks must agree on, as JSON keeps it.
        tensors: Descriptions of the tensors.
        request: The number of the persistent request that the call starts.
        names: Of the tensors, where they have any.
    """

    kind: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[TensorDescription] = ()
    request: int | None = None
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Here, before anything is sent: a name that JSON cannot carry would fail half-way.
        if self.name is not None:
            validation.instance("name", self.name, str, "a str or None")

    def __str__(self) -> str:
        # A call named "" is another one than a call without a name, and must not look the same.
        call = f"{self.kind}({'' if self.name is None else self.name or repr(self.name)})"
        return call if self.request is None else f"{call} of request {self.request}"

    @cached_property
    def code(self) -> int:
        """A hash of CODE_BITS bits, never 0, the same in every process."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=CODE_BITS // 8).digest()
        return int.from_bytes(digest, "little") or 1

    def to_json(self) -> str:
        """Return one text for equal descriptions, another one for others."""
        call = [self.kind, self.name, self.options, self.tensors, self.request, self.names]
        return json.dumps(call)

    @staticmethod
    def from_json(text: str) -> Description:
        """Return the description that `to_json` wrote."""
        kind, name, options, tensors, request, names = json.loads(text)
        described = [TensorDescription(tuple(shape), *rest) for shape, *rest in tensors]
        return Description(kind, name, options, described, request, names)

    def entries(self) -> list[str]:
        """Return the call and its parts, in words."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        names = self.names or [f"tensor {i}" for i in range(len(self.tensors))]
        tensors = [f"{name}: {each}" for name, each in zip(names, self.tensors, strict=True)]
        return [str(self), *options, *tensors]


class Call(NamedTuple):
    """A call on one rank.

    Attributes:
        description: What all ranks must make alike.
        tensors: What it works on.
        op: The reducer; any for a call that reduces nothing.
        schedule: What is run, for a call that says so itself.
        out: Where the result is written, for a call that makes a tensor else.
    """

    description: Description
    tensors: Sequence[torch.Tensor] = ()
    op: Reducer = Sum
    schedule: Schedule | None = None
    out: torch.Tensor | None = None

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """All tensors that it reads or writes."""
        return self.tensors if self.out is None else (*self.tensors, self.out)


def difference(
    calls: Mapping[int, Description], transport: Transport, movable: Collection[int] = ()
) -> str:
    """Say how the lowest rank's call and the first one that is not like it differ.

    Args:
        calls: Two or more ranks' calls, not all alike, by rank.
        transport: Between the ranks, whose names it has.
        movable: The ranks whose call is a named asynchronous one.

    Returns:
        The same text on every rank that asks.
    """
    lowest = min(calls)
    first = calls[lowest].entries()
    rank = next(r for r in sorted(calls) if calls[r].entries() != first)
    other = calls[rank].entries()
    disagree = f"ranks disagree{f' in the group{of}' if (of := transport.of_ranks) else ''}"
    one, another = transport.named([lowest]), transport.named([rank])
    if first[0] != other[0] and (lowest in movable) is not (rank in movable):
        early, late = (lowest, rank) if lowest in movable else (rank, lowest)
        return f"{disagree}: {_moved(calls[early], calls[late], early, late, transport)}"
    if first[0] != other[0]:
        return f"{disagree}: {one} calls {first[0]}, {another} calls {other[0]}"
    number = next(i for i, (mine, theirs) in enumerate(zip_longest(first, other)) if mine != theirs)
    mine, theirs = (
        _part(calls[each], number, len(calls[lowest].tensors) != len(calls[rank].tensors))
        for each in (lowest, rank)
    )
    return (
        f"{disagree}: {one} calls {first[0]} with {mine}, {another} calls {other[0]} with {theirs}"
    )


def _moved(
    call: Description, other: Description, rank: int, other_rank: int, transport: Transport
) -> str:
    """Say what to do about a named asynchronous call that met one of another name or kind.

    That may be a call of the library's own, of which the user knows nothing.
    """
    met = f"makes another call, a {other.kind}" if other.kind != call.kind else f"calls {other}"
    return (
        f"{transport.named([rank])} calls {call}, and {transport.named([other_rank])} {met}: "
        f"{call} was started at another place among the calls; start it at the same place on every "
        "rank, as before backward() on all or behind it on all, or in a group of its own "
        "(Group.split, or a process set)"
    )


def _part(call: Description, number: int, other_length: bool) -> str:
    """Return one of a call's entries, after how many tensors there are where others have more."""
    entry = [*call.entries(), ""][number] if number <= len(call.entries()) else ""
    if not other_length or (entry and number <= len(call.options)):
        return entry
    count = f"{len(call.tensors)} tensor{'' if len(call.tensors) == 1 else 's'}"
    return f"{count}, among them {entry}" if entry else count
