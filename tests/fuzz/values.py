"""Arguments that are nearly right, and not right at all."""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SPECIAL = (0.0, -0.0, 1.0, math.nan, math.inf, 1e-45, 1e-38, 6.5e4, -3.0, 1e19)


class Look(NamedTuple):
    """The shape and dtype of the right tensor that an odd one stands for."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Subclass(Tensor):
    """A tensor of another class."""


def _fresh(look: Look) -> Tensor:
    values = torch.tensor(SPECIAL, dtype=torch.float64).repeat(10)[: math.prod(look.shape)]
    if not (look.dtype.is_floating_point or look.dtype.is_complex):
        values = torch.arange(math.prod(look.shape), dtype=torch.float64)
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
