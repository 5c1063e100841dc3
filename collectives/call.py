"""The call of a collective on one rank: one object from the user's arguments to the executor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from collectives import validation
from collectives.recorder import UNRECORDED
from collectives.reducers import Reducer, Sum
from collectives.schedules.schedule import Schedule
from collectives.transport.symmetric_memory import CODE_BITS

ANY = -1


class TensorDescription(NamedTuple):
    """A tensor's description, for ranks to compare; a first dimension of ANY may differ."""

    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        shape = str(self.shape).replace(str(ANY), "any", 1)
        return f"shape {shape} {self.dtype} {self.device}"

    def zeros(self, device: torch.device | None = None) -> torch.Tensor:
        """Make zeros of this description, with 0 rows for ANY; on `device` if it is on CUDA."""
        shape = [0 if n == ANY else n for n in self.shape]
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        where = device if device is not None and self.device == device.type else self.device
        return torch.zeros(shape, dtype=dtype, device=where)


class _Plan(Protocol):
    """A plan to run the call in shared memory: `HostAllReduce`, or on GPUs `NodeAllReduce`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def by_tree(self) -> bool: ...
    @property
    def by_messages(self) -> bool: ...
    def rebind(self, call: Call) -> bool: ...
    def release(self) -> None: ...
    def ready(self) -> bool: ...
    def fill(self) -> None: ...
    def run(self, call: Call) -> None: ...


class _Replay(Protocol):
    """The capture of a request on a GPU: `collectives.execution.replay.Replay`."""

    def begin(self, held: bool) -> int: ...
    def hold(self) -> None: ...
    def start(self, runner: Any, call: Call, least: int | None, work: Callable[[], Any]) -> Any: ...


@dataclass(eq=False)
class Call:
    """One rank's call of a collective.

    Ranks compare its `text`: kind, name, options, descriptions of the tensors, names and request.
    JSON must be able to represent all options.

    Attributes:
        kind: The name of the collective.
        name: The user's name for the call.
        options: Every other argument that ranks must agree on.
        tensors: The tensors that it works on.
        op: The reducer; unused if nothing is reduced.
        names: The tensors' names, if they have any.
        any_rows: Whether ranks may differ in the first tensor's first dimension.
        schedule: The user's schedule, in `run`.
        out: The tensor for the result, if the user has given one; otherwise one is allocated.
        then: A function that is called with the result, in the thread that runs the call.
        instead: A function to call in place of an operation; joined ranks take no part in it.
        request: The number of the persistent request that the call starts.
        described: The descriptions of the tensors.
        movable: Whether it is a named asynchronous call, so that the user chooses its place among
            the calls; errors name it first.
        plan: The plan to run it in memory that the ranks share; None for messages.
        launches: The launches bound for it in memory that GPUs share; requests keep them.
        label: The call's name in errors, with its number, once it has one.
        record: The flight recorder's record, once it has begun.
        replay: The capture of its work, for a request on a GPU.
        stage: The stage of the capture that this rank sends in the negotiation.
        queued: The time of an asynchronous call's start, by time.perf_counter_ns().
    """

    kind: str
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    op: Reducer = Sum
    names: Sequence[str] = ()
    any_rows: bool = False
    schedule: Schedule | None = None
    out: torch.Tensor | None = None
    then: Callable[[Any], object] | None = None
    instead: Callable[[], Any] | None = None
    request: int | None = None
    described: list[TensorDescription] = field(default_factory=list)
    movable: bool = False
    plan: _Plan | None = None
    launches: object = None
    label: str = ""
    replay: _Replay | None = None
    # Not fields of the dataclass: a copy by `replace` is another call.
    record = UNRECORDED
    queued = 0
    stage = 0

    def __post_init__(self) -> None:
        # Checked before anything is sent: a name that JSON cannot represent would fail half-way.
        if self.name is not None:
            validation.instance("name", self.name, str, "a str or None")
        if not self.described and self.tensors:
            self.described = [
                TensorDescription(tuple(each.shape), str(each.dtype), each.device.type)
                for each in self.tensors
            ]
            if self.any_rows:
                shape, *rest = self.described[0]
                self.described[0] = TensorDescription((ANY, *shape[1:]), *rest)

    def __str__(self) -> str:
        # The name "" differs from no name, and must look different.
        call = f"{self.kind}({'' if self.name is None else self.name or repr(self.name)})"
        return call if self.request is None else f"{call} of request {self.request}"

    @property
    def title(self) -> str:
        """The call's name in timelines."""
        return f"{self.kind} {self.name!r}" if self.name else self.kind

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """All tensors that it reads or writes."""
        return self.tensors if self.out is None else (*self.tensors, self.out)

    def of(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Return a copy of the call for similar tensors, without a plan."""
        call = object.__new__(Call)
        # Not copy.copy, which takes many times as long: gradients are replaced at every start.
        call.__dict__.update(self.__dict__, tensors=tensors, plan=None, stage=0)
        return call

    def set_option(self, name: str, value: Any) -> None:
        """Set an option, or remove it if the value is None."""
        if self.options.get(name) != value:
            self.options = {**self.options, name: value}
            if value is None:
                del self.options[name]
            # Drop the cached values that depend on the options.
            self.__dict__.pop("text", None)
            self.__dict__.pop("code", None)

    @cached_property
    def text(self) -> str:
        """JSON text, equal only for calls that match."""
        call = [self.kind, self.name, self.options, self.described, self.request, self.names]
        return json.dumps(call)

    @cached_property
    def code(self) -> int:
        """A hash of `text`, of CODE_BITS bits, never 0, the same in every process."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=CODE_BITS // 8).digest()
        return int.from_bytes(digest, "little") or 1

    @staticmethod
    def of_text(text: str) -> Call:
        """Return the call with this `text`, without its tensors."""
        kind, name, options, tensors, request, names = json.loads(text)
        described = [TensorDescription(tuple(shape), *rest) for shape, *rest in tensors]
        return Call(kind, name, options, names=names, request=request, described=described)

    def entries(self) -> list[str]:
        """Return texts for the call, its options and its tensors."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        names = self.names or [f"tensor {i}" for i in range(len(self.described))]
        tensors = [f"{name}: {each}" for name, each in zip(names, self.described, strict=True)]
        return [str(self), *options, *tensors]
