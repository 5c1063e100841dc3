"""What a call may do: return, or raise what is documented and have changed nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from collectives import CollectiveMismatchError
from tests.fuzz.values import ODD_TENSORS, ODD_VALUES, Look

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
# The same few examples in every run, so that CI does not change its mind; FUZZ_EXAMPLES=1000 looks
# for new ones, as many, from a fresh seed.
SETTINGS = settings(
    max_examples=int(EXAMPLES or 12),
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
REJECTIONS = (TypeError, ValueError, NotImplementedError, CollectiveMismatchError)


@dataclass
class Call:
    """The arguments of a call that is right."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def get(self, key: int | str) -> Any:
        """Return an argument, by its place or its name."""
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def put(self, key: int | str, value: Any) -> None:
        """Replace an argument."""
        into: Any = self.args if isinstance(key, int) else self.kwargs
        into[key] = value


def right(*args: Any, **kwargs: Any) -> Call:
    """Return a right call: optional arguments are passed, too, so that each has its turn."""
    return Call(list(args), kwargs)


def wrong_calls(
    name: str, make: Callable[[], Call], *, huge: bool = True
) -> Iterator[tuple[str, Call]]:
    """Yield the right call, and others with one odd argument each, the same ones on every rank.

    Odd tensors and values stand in the place of any argument; of a list of tensors, in one's.

    huge: whether numbers beyond what memory holds are among them.
    """
    yield "as it is", make()
    draw, many = random.Random(name), int(EXAMPLES or 12)
    values = [v for v in ODD_VALUES if huge or type(v) is not int or abs(v) < 2**31]
    keys: list[int | str] = [*range(len(make().args)), *make().kwargs]
    for key in keys:
        for value in draw.sample(values, min(many, len(values))):
            call = make()
            call.put(key, value)
            yield f"{key}={value!r}", call
        # One that wants a gradient in any case: an answer must not.
        for kind in ["leaf", *draw.sample(list(ODD_TENSORS), min(many, len(ODD_TENSORS)))]:
            call = make()
            old = call.get(key)
            first = old[0] if isinstance(old, list) and old else old
            listed = first is not old and isinstance(first, Tensor)
            like = first if isinstance(first, Tensor) else torch.zeros(6)
            odd = ODD_TENSORS[kind](Look(tuple(like.shape), like.dtype))
            call.put(key, [*old[:-1], odd] if listed else odd)
            yield f"{key}={kind}", call


def attempt(function: Callable[..., Any], call: Call, *, reads_only: bool = False) -> Any:
    """Make the call: (its answer, None) or (None, a documented error that changed nothing).

    reads_only: an answer must have changed nothing either.
    """
    tensors = list(_tensors_in([call.args, call.kwargs]))
    before = [_bits(tensor) for tensor in tensors]
    try:
        answer = function(*call.args, **call.kwargs)
        answer = answer.wait() if hasattr(answer, "wait") else answer
        rejection = None
    except REJECTIONS as error:
        answer, rejection = None, error
    assert rejection is None or str(rejection), f"{type(rejection).__name__} without a text"
    if rejection is not None or reads_only:
        changed = [t.shape for t, bits in zip(tensors, before, strict=True) if _bits(t) != bits]
        assert not changed, f"{rejection or 'answered'}, but changed: {changed}"
    return answer, rejection


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _bits(tensor: Tensor) -> Any:
    if tensor.is_nested or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return None
    look = (tuple(tensor.shape), tensor.dtype, str(tensor.layout), tensor.requires_grad)
    tensor = tensor.detach()
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr) or tensor.is_mkldnn:
        dense = tensor.to_dense()
        return look, _raw(dense)
    if tensor.is_meta or tensor._is_zerotensor():
        return look
    return look, _raw(tensor), None if tensor.is_inference() else tensor._version


def _raw(tensor: Tensor) -> bytes:
    """All of the memory that the tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
