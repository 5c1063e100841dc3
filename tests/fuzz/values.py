"""What the fuzzers pass: arguments that are right, nearly right, and not right at all.

An `Arg` is a recipe: `make(memory)` builds the value anew, so that every rank gets its own and what
was passed can be told from what is there afterwards. Tensors are cut from a few slots of one
memory, so that arguments alias and overlap.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

SLOT_BYTES = 1024
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
SHAPES = ((6,), (2, 3), (1,), (), (0,), (3, 0), (7,), (13,))
SPECIAL = (0.0, -0.0, 1.0, math.nan, math.inf, 1e-45, 1e-38, 6.5e4, -3.0, 1e19)


class Look(NamedTuple):
    """Shape and dtype that the tensors of one call mostly share."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Memory:
    """What the tensors of one call lie in."""

    seed: int = 0
    slots: dict[int, Tensor] = field(default_factory=dict)
    made: list[Tensor] = field(default_factory=list)

    def slot(self, number: int) -> Tensor:
        """SLOT_BYTES bytes that hold small float32 numbers."""
        if number not in self.slots:
            values = torch.arange(SLOT_BYTES // 4, dtype=torch.float32) - 100.0 * number + self.seed
            self.slots[number] = values.view(torch.uint8)
        return self.slots[number]

    def add(self, tensor: Tensor) -> Tensor:
        self.made.append(tensor)
        return tensor


@dataclass(frozen=True)
class Arg:
    """How one argument is made; `text` is what a failure shows."""

    text: str
    make: Callable[[Memory], Any]

    def __repr__(self) -> str:
        return self.text


def constant(value: Any) -> Arg:
    """The same object for every call."""
    return Arg(repr(value), lambda memory: value)


def _numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def plain(look: Look, slot: int, shift: int = 0) -> Arg:
    """A contiguous tensor `shift` elements into a slot."""

    def make(memory: Memory) -> Tensor:
        size = look.dtype.itemsize
        start = 64 + shift * size
        part = memory.slot(slot)[start : start + _numel(look.shape) * size]
        return memory.add(part.view(look.dtype).view(look.shape))

    return Arg(f"<{look.shape} {look.dtype} slot {slot}+{shift}>", make)


class Subclass(Tensor):
    """A tensor of another class."""


def _fresh(look: Look) -> Tensor:
    values = torch.tensor(SPECIAL, dtype=torch.float64).repeat(2)[: _numel(look.shape)]
    if not (look.dtype.is_floating_point or look.dtype.is_complex):
        values = torch.arange(_numel(look.shape), dtype=torch.float64)
    return values.to(look.dtype).reshape(look.shape)


def _floating(look: Look) -> torch.dtype:
    return look.dtype if look.dtype.is_floating_point else torch.float32


def _inference(look: Look) -> Tensor:
    with torch.inference_mode():
        return _fresh(look)


def _non_leaf(look: Look) -> Tensor:
    return torch.zeros(look.shape, dtype=_floating(look), requires_grad=True) * 1.0


ODD_TENSORS: dict[str, Callable[[Look], Tensor]] = {
    "special values": _fresh,
    "every second": lambda k: torch.zeros(*k.shape, 2, dtype=k.dtype)[..., 0],
    "transposed": lambda k: torch.zeros(3, 2, dtype=k.dtype).t(),
    "expanded": lambda k: torch.zeros(1, dtype=k.dtype).expand(k.shape or (6,)),
    "overlapping rows": lambda k: torch.zeros(8, dtype=k.dtype).as_strided((2, 3), (2, 1)),
    "channels last": lambda k: torch.zeros(1, 2, 3, 2, dtype=k.dtype).to(
        memory_format=torch.channels_last
    ),
    "other shape": lambda k: torch.zeros(5, dtype=k.dtype),
    "bool": lambda k: torch.zeros(k.shape, dtype=torch.bool),
    "int64": lambda k: torch.zeros(k.shape, dtype=torch.int64),
    "uint16": lambda k: torch.zeros(k.shape, dtype=torch.uint16),
    "float8": lambda k: torch.zeros(k.shape, dtype=torch.float8_e4m3fn),
    "complex": lambda k: torch.ones(k.shape, dtype=torch.complex64) * 1j,
    "conjugate bit": lambda k: (torch.ones(k.shape, dtype=torch.complex64) * 1j).conj(),
    "negative bit": lambda k: torch._neg_view(torch.ones(k.shape, dtype=_floating(k))),
    "negative view": lambda k: (torch.ones(1, dtype=torch.complex64) * 1j).conj().imag,
    "sparse": lambda k: torch.eye(2, 3).to_sparse(),
    "sparse empty": lambda k: torch.sparse_coo_tensor(size=(2, 3)),
    "csr": lambda k: torch.eye(2, 3).to_sparse_csr(),
    "meta": lambda k: torch.empty(k.shape, dtype=k.dtype, device="meta"),
    "huge meta": lambda k: torch.empty(2**33, dtype=k.dtype, device="meta"),
    "leaf": lambda k: torch.ones(k.shape, dtype=_floating(k), requires_grad=True),
    "not a leaf": _non_leaf,
    "parameter": lambda k: torch.nn.Parameter(torch.ones(k.shape, dtype=_floating(k))),
    "buffer": lambda k: torch.nn.Buffer(torch.ones(k.shape, dtype=k.dtype)),
    "subclass": lambda k: torch.ones(k.shape, dtype=k.dtype).as_subclass(Subclass),
    "inference": _inference,
    "quantised": lambda k: torch.quantize_per_tensor(torch.zeros(6), 0.1, 0, torch.qint8),
    "nested": lambda k: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda k: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "mkldnn": lambda k: torch.ones(2, 3).to_mkldnn(),
    "uninitialised parameter": lambda k: torch.nn.UninitializedParameter(),
}


class _Sequence:
    """Has a length and items, and is no Sequence."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return [0, 6][index]


ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    2**31,
    2**63,
    10**400,
    -(2**64),
    0.0,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    1e-300,
    1j,
    "",
    "xring",
    "tensor",
    "\x00\ud800",
    b"bytes",
    (),
    [],
    {},
    [[]],
    [[1, [2]], None],
    ["a"],
    [0, 6],
    (0, 6.0),
    [True, 2],
    [None],
    {"a": 1},
    {1, 2},
    object(),
    int,
    len,
    torch.float32,
    torch.int8,
    torch.device("cpu"),
    torch.strided,
    np.float32(2.0),
    np.int64(3),
    np.zeros(6, dtype=np.float32),
    np.zeros(0),
    fractions.Fraction(1, 3),
    range(3),
    _Sequence(),
    NotImplemented,
    ...,
)


def _odd_tensor(name: str, look: Look) -> Arg:
    return Arg(
        f"<{name} {look.shape} {look.dtype}>", lambda memory: memory.add(ODD_TENSORS[name](look))
    )


looks = st.builds(
    Look,
    st.sampled_from((*SHAPES[:2], *SHAPES)),
    st.sampled_from((*FLOATS, torch.float32, *DTYPES)),
)
float_looks = st.builds(Look, st.sampled_from((*SHAPES[:2], *SHAPES)), st.sampled_from(FLOATS))


def sometimes(
    rarely: st.SearchStrategy[Arg], mostly: st.SearchStrategy[Arg], one_in: int = 12
) -> st.SearchStrategy[Arg]:
    """`rarely` in one draw of so many."""
    return st.integers(0, one_in - 1).flatmap(lambda n: rarely if n == one_in - 1 else mostly)


def odd(look: Look) -> st.SearchStrategy[Arg]:
    """Anything: half of it tensors."""
    tensors = st.sampled_from([_odd_tensor(name, look) for name in ODD_TENSORS])
    return tensors | st.sampled_from([constant(value) for value in ODD_VALUES])


def tensor(look: Look) -> st.SearchStrategy[Arg]:
    """Mostly a tensor of this look; else one of another dtype or an odd thing."""
    places = st.builds(plain, st.just(look), st.integers(0, 3), st.sampled_from((0, 0, 0, 1)))
    other = st.builds(plain, looks, st.integers(0, 3))
    return sometimes(odd(look) | other, places)


def optional(look: Look) -> st.SearchStrategy[Arg]:
    """An output: often None."""
    return st.just(constant(None)) | tensor(look)


def _listed(kind: type, parts: Sequence[Arg]) -> Arg:
    return Arg(repr(kind(parts)), lambda memory: kind(part.make(memory) for part in parts))


def tensors(look: Look) -> st.SearchStrategy[Arg]:
    """Mostly a list of tensors of this look, in slots of their own; else an odd thing."""
    apart = st.lists(st.integers(0, 5), unique=True, max_size=4).flatmap(
        lambda slots: st.just([plain(look, slot) for slot in slots])
    )
    mixed = st.lists(tensor(look), max_size=4)
    kinds = st.sampled_from((list, list, list, tuple))
    lists = st.builds(_listed, kinds, apart) | st.builds(_listed, kinds, mixed)
    return sometimes(odd(look), lists)


def value(*good: Any) -> st.SearchStrategy[Arg]:
    """Mostly one of these constants; else an odd thing."""
    return sometimes(
        odd(Look((6,), torch.float32)), st.sampled_from([constant(each) for each in good])
    )


def flag() -> st.SearchStrategy[Arg]:
    """`found_inf`: None, one float32, or wrong."""
    right = plain(Look((), torch.float32), 5, 30)
    return sometimes(
        odd(Look((), torch.float32)), st.sampled_from([constant(None), constant(None), right])
    )


def segments(look: Look) -> st.SearchStrategy[Arg]:
    """Boundaries over the elements of a tensor, and boundaries that are not."""
    numel = _numel(look.shape)
    inner = st.lists(st.integers(0, max(numel, 1)), max_size=3)
    made = st.builds(
        lambda cuts, end, kind: constant(kind([0, *sorted(cuts), end])),
        inner.map(lambda cuts: [min(cut, numel) for cut in cuts]),
        st.sampled_from((numel, numel, numel, numel, numel + 1)),
        st.sampled_from((list, tuple)),
    )
    return sometimes(odd(look), st.just(constant(None)) | made, 6)
