"""A call that is made again and again on the same tensors, whose values change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from tests.kernels.cases import bits, poisoned, random

SHAPE = (8, 9)
Call = Callable[[], Any]


class Case:
    """wide: into float64. given: with `out`. flag: with `found_inf`."""

    def __init__(self, function: str, dtype: torch.dtype, wide: bool, given: bool, flag: bool):
        self.target = torch.float64 if wide else dtype
        self.tensors = [poisoned(SHAPE, dtype, "cpu") for _ in range(3)]
        self.layout = kernels.layout_of(self.tensors, dtype=self.target)
        packs = function in ("pack", "unpack")
        shape = (self.layout.numel,) if packs else SHAPE
        self.whole = poisoned(shape, self.target, "cpu")
        self.found_inf = torch.zeros(1) if flag else None
        options: dict[str, Any] = {"found_inf": self.found_inf}
        self.out: Tensor | None = self.whole if given and function != "unpack" else None
        if function != "unpack":
            options["out"] = self.out
        a, b, _ = self.tensors
        self.call: Call
        if function == "pack":
            self.call = partial(
                kernels.pack, self.tensors, layout=self.layout, scale=0.7, **options
            )
        elif function == "unpack":
            self.call = partial(
                kernels.unpack, self.whole, self.tensors, layout=self.layout, scale=0.7, **options
            )
        elif function == "sum_n":
            self.call = partial(
                kernels.sum_n, self.tensors, scale=0.7, dtype=self.target, **options
            )
        else:
            self.call = partial(
                kernels.scaled_add, a, b, alpha=0.3, beta=-2.5, dtype=self.target, **options
            )

    def fill(self, seed: int, bad: bool = False) -> None:
        for i, tensor in enumerate([*self.tensors, self.whole]):
            tensor.copy_(random(tuple(tensor.shape), tensor.dtype, "cpu", 10 * seed + i))
            if bad:
                tensor.view(-1)[5] = torch.inf
        if self.found_inf is not None:
            self.found_inf.zero_()

    def results(self) -> list[Any]:
        found = self.call()
        listed = found if isinstance(found, list) else [found]
        return [*map(bits, listed), None if self.found_inf is None else self.found_inf.item()]
