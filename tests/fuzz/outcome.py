"""What a call may do: return, or raise what is documented and have changed nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from tests.fuzz.values import Arg, Memory

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
REJECTIONS = (TypeError, ValueError)


class Recipe(NamedTuple):
    """A call that can be made any number of times."""

    function: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]

    def __repr__(self) -> str:
        shown = [*map(repr, self.args), *(f"{key}={arg}" for key, arg in self.kwargs.items())]
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(shown)})"

    def build(self, memory: Memory) -> tuple[list[Any], dict[str, Any]]:
        args = [arg.make(memory) for arg in self.args]
        return args, {key: arg.make(memory) for key, arg in self.kwargs.items()}


class Snapshot:
    """The bits of everything that a call was given, and how often each tensor was written."""

    def __init__(self, memory: Memory) -> None:
        self._tensors = [*memory.slots.values(), *memory.made]
        self._before = [_bits(tensor) for tensor in self._tensors]

    def changed(self) -> list[str]:
        """What differs now."""
        after = map(_bits, self._tensors)
        return [
            f"{tuple(t.shape)} {t.dtype}"
            for t, a, b in zip(self._tensors, after, self._before, strict=True)
            if a != b
        ]


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


def attempt(
    recipe: Recipe,
    rejections: Sequence[type[BaseException]] = REJECTIONS,
    *,
    reads_only: bool = False,
    seed: int = 0,
) -> tuple[Any, BaseException | None]:
    """Make the call: (its answer, None) or (None, a documented error that changed nothing).

    reads_only: an answer must have changed nothing either.
    """
    memory = Memory(seed)
    args, kwargs = recipe.build(memory)
    before = Snapshot(memory)
    answer: Any = None
    rejection: BaseException | None = None
    try:
        answer = recipe.function(*args, **kwargs)
    except tuple(rejections) as error:
        rejection = error
    if rejection is not None:
        assert str(rejection), f"{type(rejection).__name__} without a text"
    if rejection is not None or reads_only:
        changed = before.changed()
        assert not changed, f"{rejection or 'answered'}, but changed: {changed}"
    return answer, rejection
