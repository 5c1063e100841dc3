"""What a call of a collective is, as ranks tell each other: plain data that JSON carries."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

ANY = -1
# Of the calls that passed the checks, how many are remembered.
_MOST = 1024


class Like(NamedTuple):
    """What a tensor looks like. ANY as the first dimension: ranks may differ in it."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        shape = str(self.shape).replace(str(ANY), "any", 1)
        return f"shape {shape} {self.dtype} {self.device}"

    def zeros(self, device: torch.device | None = None) -> torch.Tensor:
        """Zeros of this look, with no rows for ANY; of CUDA tensors on `device`."""
        shape = [0 if n == ANY else n for n in self.shape]
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        place = device if device is not None and self.device == device.type else self.device
        return torch.zeros(shape, dtype=dtype, device=place)


def like(tensor: torch.Tensor, *, any_rows: bool = False) -> Like:
    """What `tensor` looks like."""
    shape = (ANY, *tensor.shape[1:]) if any_rows else tuple(tensor.shape)
    return Like(shape, str(tensor.dtype), tensor.device.type)


@dataclass(frozen=True)
class Description:
    """A call as all ranks must make it.

    kind: what is called. name: what the user calls it. options: every other argument that ranks
    must agree on, as JSON keeps it. tensors: what the tensors look like. kept: for whoever works
    out something of it that every call like it needs.
    """

    kind: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Like] = ()
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Here, before anything is sent: a name that JSON cannot carry would fail half-way.
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name must be a str or None, got {type(self.name).__name__}")

    def __str__(self) -> str:
        # A call named "" is another one than a call without a name, and must not look the same.
        return f"{self.kind}({'' if self.name is None else self.name or repr(self.name)})"

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal descriptions, other for others; in this process alone."""
        return self.kind, self.name, tuple(self.options.items()), tuple(self.tensors)

    def to_json(self) -> str:
        """One text for equal descriptions, another one for others."""
        return json.dumps([self.kind, self.name, self.options, self.tensors])

    @staticmethod
    def from_json(text: str) -> Description:
        """The description that `to_json` wrote."""
        kind, name, options, tensors = json.loads(text)
        looks = [Like(tuple(shape), dtype, device) for shape, dtype, device in tensors]
        return Description(kind, name, options, looks)

    def entries(self) -> list[str]:
        """The call and its parts, in words."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        looks = [f"tensor {i}: {look}" for i, look in enumerate(self.tensors)]
        return [str(self), *options, *looks]


class Described:
    """The calls that passed the checks, by all that was checked but the tensor's memory."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Description] = {}

    def get(self, known: Hashable) -> Description | None:
        try:
            return self._calls.get(known)
        except TypeError:
            # An argument without a hash is a wrong one, or an operator of the user's.
            return None

    def keep(self, known: Hashable, call: Description) -> None:
        with contextlib.suppress(TypeError):
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[known] = call


def difference(calls: Mapping[int, Description]) -> str:
    """The first difference between the calls, by rank, from the lowest rank's: the same text
    wherever it is asked for."""
    lowest = min(calls)
    first = calls[lowest].entries()
    rank = next(r for r in sorted(calls) if calls[r].entries() != first)
    other = calls[rank].entries()
    if first[0] != other[0]:
        return f"ranks disagree: rank {lowest} calls {first[0]}, rank {rank} calls {other[0]}"
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            return (
                f"ranks disagree: rank {lowest} calls {first[0]} with {mine}, "
                f"rank {rank} calls {other[0]} with {theirs}"
            )
    return (
        f"ranks disagree: rank {lowest} calls {first[0]} with {len(first) - 1} entries, "
        f"rank {rank} with {len(other) - 1} entries"
    )
