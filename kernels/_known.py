"""Calls that have passed the checks, recognised by one call in C++ the next time.

A training loop makes the same calls again and again: on the gradients of one bucket, or on what
lies where they lay. torch.compile's own guards compare a tensor's class, dispatch keys (device,
layout, negative views), dtype, device index, requires_grad, sizes and strides with those of another
that was there before, in a tenth of a microsecond; reading as much from Python takes half of one.
Keys are compared as the current mode sees them: a guard made inside inference mode, or below
autograd, does not tell an inference tensor from another. Addresses are asked each time.
"""

from __future__ import annotations

import itertools
import operator
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels import _recall
from kernels.validation import PLAIN, check_written

_guards: Callable[..., Any] | None
try:
    # Of no promised form: without it every call is checked as if it were new.
    from torch._C._dynamo.guards import TensorGuards as _guards
except ImportError:
    _guards = None

Value = TypeVar("Value")
# Calls that are alike at first sight; and addresses in all that one of them remembers.
_ALIKE = 8
_ADDRESSES = 1024
# What is seen of a call at once: its key, how many tensors and how long, what they are to it.
_SIGHT = struct.Struct("Qqqqqq").pack
_transform = torch._C._functorch.peek_interpreter_stack
_is_nested = operator.attrgetter("is_nested")


class Place(NamedTuple):
    """Where the tensors of a call lie.

    inputs: the addresses of the first. in_c: of all, as C reads them; empty where one is no plain
    tensor or has no memory.
    """

    inputs: tuple[int, ...]
    in_c: array[int]


class Known(Generic[Value]):
    """A call that has passed the checks.

    value: what its function keeps of it. writable: whether none that it stands for has an inference
    tensor; where False, that is to be asked each time. places: by the addresses of the tensors that
    are given, as uint64. job: how C makes the call again; None where it does not.
    """

    __slots__ = ("check", "job", "places", "value", "writable")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.check: Callable[..., bool] | None = None
        self.places: dict[bytes, Place] = {}
        self.job: tuple[Any, ...] | None = None
        self.writable = False

    @property
    def is_met_again(self) -> bool:
        """Whether C recognises it, and has yet to be told how to make it."""
        return self.job is None and self.check is not None

    def found_apart(self, tensors: Sequence[Tensor], inputs: int) -> Place:
        """Remember where tensors lie that do not overlap where they must not.

        inputs: how many of them are. After too many addresses, in place of all others.
        """
        addresses = array("Q", map(Tensor.data_ptr, tensors))
        in_c = addresses if in_memory(tensors, addresses) else array("Q")
        found = Place(tuple(addresses[:inputs]), in_c)
        if (len(self.places) + 1) * len(addresses) > _ADDRESSES:
            self.places.clear()
        self.places[addresses.tobytes()] = found
        return found


def in_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Whether they can be read at their addresses: wrappers, fakes and torch's zeros cannot."""
    if not PLAIN.issuperset(map(type, tensors)):
        return False
    # Without memory a tensor's address is where it starts: 0, of a view more, but no such number.
    if min(addresses, default=_recall.FAR) >= _recall.FAR:
        return True
    starts = map(
        operator.mul, map(Tensor.storage_offset, tensors), map(Tensor.element_size, tensors)
    )
    nowhere = itertools.compress(tensors, map(operator.eq, addresses, starts))
    return not any(map(Tensor.numel, nowhere))


class KnownCalls(Generic[Value]):
    """The latest calls of a function, by all that can be seen at once.

    limit: of what is seen; when there are more, all are forgotten.
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self.calls: dict[bytes, tuple[Known[Value], ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.calls.values()))

    def checked(
        self,
        check: Callable[[], Value],
        key: object,
        inputs: Sequence[Tensor],
        others: tuple[Tensor | None, ...] = (),
        out: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> tuple[Known[Value], Place | None]:
        """What is known of a call: what `check` returned or, where it is new, returns now.

        And where its tensors lie, None where that is not known. check: looks at nothing but these
        tensors and `key`, which is one by its identity and kept in what `check` returns, or lives
        as long as the process. others: none of them one of the inputs. out: may be one. beside: one
        that may lie anywhere.
        """
        found: tuple[Known[Value], Place | None] | None
        found = _recall.recognise(self.calls, key, inputs, others, out, beside)
        if found is not None:
            return found
        tensors = [*inputs]
        # A bit each: whether it is given. Which of the inputs `out` is; -1: none; -2: not given.
        given, at = 1, -2
        for other in others:
            given <<= 1
            if other is not None:
                given |= 1
                tensors.append(other)
        if out is not None:
            for position, tensor in enumerate(inputs):
                if tensor is out:
                    at = position
                    break
            else:
                at = -1
                tensors.append(out)
        placed = len(tensors)
        if beside is not None:
            tensors.append(beside)
        if not tensors or not PLAIN.issuperset(map(type, tensors)):
            return Known(check()), None
        # Asked about a nested tensor a guard ends the process.
        if any(map(_is_nested, tensors)):
            return Known(check()), None
        ends = tensors[0].numel(), tensors[-1].numel()
        sight = _SIGHT(id(key), len(tensors), *ends, at, given)
        alike = self.calls.get(sight)
        if alike:
            for known in alike:
                if known.check is not None and known.check(*tensors):
                    if not known.writable and any(map(Tensor.is_inference, tensors)):
                        check()
                    addresses = array("Q", map(Tensor.data_ptr, tensors[:placed])).tobytes()
                    return known, known.places.get(addresses)
        known = Known(check())
        # What comes once is not worth a guard.
        if alike is None:
            if len(self.calls) >= self._limit:
                self.calls.clear()
            self.calls[sight] = ()
        elif (
            _guards is not None
            # One tensor twice is never found by a guard.
            and len(set(map(id, tensors))) == len(tensors)
            # One transform of torch.func looks to guards as another does.
            and _transform() is None
        ):
            known.check = _check_of(tensors)
            known.writable = _tells_inference() and not any(map(Tensor.is_inference, tensors))
            self.calls[sight] = (known, *alike[: _ALIKE - 1])
            _recall.load()
        return known, None


def given_of(
    inputs: Sequence[Tensor], others: tuple[Tensor | None, ...], out: Tensor | None
) -> list[Tensor]:
    """The tensors of a call, in the order in which `Known.places` has their addresses."""
    given = [*inputs, *(other for other in others if other is not None)]
    if out is not None and all(tensor is not out for tensor in inputs):
        given.append(out)
    return given


def place_of(
    inputs: Sequence[Tensor],
    known: Known[Any],
    out: Tensor | None,
    found_inf: Tensor | None,
    name: Callable[[int], str],
) -> Place:
    """Where the tensors given to an elementwise function lie, after `check_written`.

    out: None where it is to be made.
    """
    check_written(out, found_inf, inputs, name)
    return known.found_apart(given_of(inputs, (found_inf,), out), len(inputs))


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors differ from these in nothing but addresses."""
    assert _guards is not None
    check: Callable[..., bool] = _guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


# Alike in all but this.
with torch.inference_mode(mode=False):
    _ORDINARY = torch.empty(0, dtype=torch.uint8, device="cpu")
with torch.inference_mode():
    _INFERENCE = torch.empty(0, dtype=torch.uint8, device="cpu")


def _tells_inference() -> bool:
    """Whether a guard made now refuses an inference tensor in the place of another, always.

    By the key of autograd, which only the other has: what was seen to have it once keeps it.
    """
    # In inference mode a tensor from outside looks as one from inside looks out there. And imported
    # in a mode of torch's that makes tensors of another class these two would tell nothing.
    if torch.is_inference_mode_enabled() or not type(_ORDINARY) is type(_INFERENCE) is Tensor:
        return False
    return not _check_of([_ORDINARY])(_INFERENCE)
