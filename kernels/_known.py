"""Lists of tensors that have passed the checks, recognised by one call in C++ the next time.

A training loop hands over the same lists again and again: the gradients of one bucket, or what
lies where they lay. torch.compile's own guards compare a tensor's class, dispatch keys (device,
layout, negative views, inference mode), dtype, device index, requires_grad, sizes and strides with
those of another that was there before, in a tenth of a microsecond; reading as much from Python
takes half of one. Only addresses, which change, are for the caller to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_guards: Callable[..., Any] | None
try:
    # Of no promised form: without it every list is checked as if it were new.
    from torch._C._dynamo.guards import TensorGuards as _guards
except ImportError:
    _guards = None

Value = TypeVar("Value")
# A guard remembers a class by its address, so it must be one that stays.
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Lists of one key, and where one of them lay: a model's layers have the same shapes, say.
_ALIKE = 8
_PLACES = 64


class Known(Generic[Value]):
    """A list that has passed the checks.

    value: what its function knows of it by now. apart: addresses of it, and of what a call writes,
    that were found not to overlap.
    """

    __slots__ = ("apart", "check", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.apart: set[Hashable] = set()
        self.check: Callable[..., bool] | None = None

    def found_apart(self, place: Hashable) -> None:
        """Remember these addresses; after so many, in place of all others."""
        if len(self.apart) >= _PLACES:
            self.apart.clear()
        self.apart.add(place)


class KnownLists(Generic[Value]):
    """By key, length and first shape the latest lists; too many, and all are forgotten."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._lists: dict[Hashable, tuple[Known[Value], ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def find(self, key: Hashable, tensors: Sequence[object]) -> Known[Value] | None:
        """What is known of tensors like these, in all but addresses; None where nothing is."""
        for known in self._lists.get(_place(key, tensors), ()):
            if known.check is not None and known.check(*tensors):
                return known
        return None

    def keep(self, key: Hashable, tensors: Sequence[Tensor], value: Value) -> Known[Value]:
        """The same for tensors that have passed the checks; found again from the second time on.

        What comes once is not worth a guard. One tensor twice in a list is never found: guards
        tell nothing of that.
        """
        known = Known(value)
        if _guards is None or not tensors or not _PLAIN.issuperset(map(type, tensors)):
            return known
        if len(set(map(id, tensors))) < len(tensors):
            return known
        place = _place(key, tensors)
        alike = self._lists.get(place)
        if alike is None:
            if len(self._lists) >= self._limit:
                self._lists.clear()
            self._lists[place] = ()
            return known
        known.check = _guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
        self._lists[place] = (known, *alike[: _ALIKE - 1])
        return known


def _place(key: Hashable, tensors: Sequence[object]) -> Hashable:
    first = tensors[0] if tensors else None
    return key, len(tensors), first.shape if isinstance(first, Tensor) else None
