"""Lists of tensors that have passed the checks, recognised by one call in C++ the next time.

A training loop hands over the same lists again and again: the gradients of one bucket, or what
lies where they lay. torch.compile's own guards compare a tensor's class, dispatch keys (device,
layout, negative views), dtype, device index, requires_grad, sizes and strides with those of another
that was there before, in a tenth of a microsecond; reading as much from Python takes half of one.
Keys are compared as the current mode sees them: a guard made inside inference mode, or below
autograd, does not tell an inference tensor from another. Addresses are for the caller to ask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kernels._check import PLAIN

_guards: Callable[..., Any] | None
try:
    # Of no promised form: without it every list is checked as if it were new.
    from torch._C._dynamo.guards import TensorGuards as _guards
except ImportError:
    _guards = None

Value = TypeVar("Value")
# Lists that are alike at first sight; and addresses in all that one of them remembers.
_ALIKE = 8
_ADDRESSES = 1024
_is_nested = operator.attrgetter("is_nested")


class Known(Generic[Value]):
    """A list that has passed the checks.

    value: what its function keeps of it, if anything. apart: addresses of it, and of what a call
    writes, that were found not to overlap. writable: whether no list that it stands for holds an
    inference tensor; where False, the caller has to ask.
    """

    __slots__ = ("apart", "check", "value", "writable")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.apart: set[tuple[Hashable, ...]] = set()
        self.check: Callable[..., bool] | None = None
        self.writable = False

    def found_apart(self, place: tuple[Hashable, ...], length: int) -> None:
        """Remember these addresses of a list of so many; after too many, in place of all others."""
        if (len(self.apart) + 1) * length > _ADDRESSES:
            self.apart.clear()
        self.apart.add(place)


class KnownLists(Generic[Value]):
    """The latest lists of each key, length, first and last shape.

    limit: of those; when there are more, all are forgotten.
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._lists: dict[Hashable, tuple[Known[Value], ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def find(self, key: Hashable, tensors: Sequence[object]) -> Known[Value] | None:
        """What is known of a list that differs from this one in nothing but addresses, or None."""
        alike = self._lists.get(_sight(key, tensors), ())
        # Asked about a nested tensor a guard ends the process.
        if not alike or not PLAIN.issuperset(map(type, tensors)) or any(map(_is_nested, tensors)):
            return None
        for known in alike:
            if known.check is not None and known.check(*tensors):
                return known
        return None

    def keep(self, key: Hashable, tensors: Sequence[Tensor], value: Value) -> Known[Value]:
        """Make a list known that has passed the checks, from its second time on.

        What comes once is not worth a guard. A guard remembers a class by its address, so it must
        be one that stays; and one tensor twice in a list it never finds.
        """
        known = Known(value)
        if _guards is None or not tensors or not PLAIN.issuperset(map(type, tensors)):
            return known
        if len(set(map(id, tensors))) < len(tensors):
            return known
        sight = _sight(key, tensors)
        alike = self._lists.get(sight)
        if alike is None:
            if len(self._lists) >= self._limit:
                self._lists.clear()
            self._lists[sight] = ()
            return known
        known.check = _check_of(tensors)
        known.writable = _tells_inference() and not any(map(Tensor.is_inference, tensors))
        self._lists[sight] = (known, *alike[: _ALIKE - 1])
        return known


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors differ from these in nothing but addresses."""
    assert _guards is not None
    check: Callable[..., bool] = _guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


def _tells_inference() -> bool:
    """Whether a guard made now refuses an inference tensor in the place of another, always.

    By the key of autograd, which only the other has: what was seen to have it once keeps it.
    """
    # Alike in all but this, and made anew: in another mode they may be of another kind, and a dtype
    # left to torch may have become another.
    ordinary = torch.empty(0, dtype=torch.uint8, device="cpu")
    with torch.inference_mode():
        inference = torch.empty(0, dtype=torch.uint8, device="cpu")
    # In a mode of torch's that makes tensors of a class of its own this would tell nothing.
    plain = type(ordinary) is type(inference) is Tensor
    return plain and not _check_of([ordinary])(inference)


def _sight(key: Hashable, tensors: Sequence[object]) -> Hashable:
    if not tensors:
        return key, 0
    return key, len(tensors), _shape(tensors[0]), _shape(tensors[-1])


def _shape(tensor: object) -> torch.Size | None:
    """None for what no list that is known holds, and may not tell its shape."""
    if type(tensor) not in PLAIN or not isinstance(tensor, Tensor) or tensor.is_nested:
        return None
    return tensor.shape
