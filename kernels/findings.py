"""What a function reports of the values it writes, beside its output.

One field of `Findings` is one optional argument of every function that writes. Its check, its
overlap with other arguments and its order are here; `report` in kernels/gpu/tiles.py, `report` in
kernels/cpu/native.c and `report` in kernels/cpu/torch_fallback.py find its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.validation import check_no_overlap, check_tensor, check_writable

__all__ = ["Findings"]


class Findings(NamedTuple):
    """Tensors of one element that a function writes beside its output, None where not asked for.

    The order of the fields is that of the arguments of operators, of the struct in C and of the
    tuple that a Triton kernel takes.

    Attributes:
        found_inf: float32, set to 1 where a value written is Inf or NaN, else left, as torch's
            GradScaler has it.
    """

    found_inf: Tensor | None = None

    def given(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and tensor of those asked for."""
        for name, tensor in zip(self._fields, self, strict=True):
            if tensor is not None:
                yield name, tensor

    def check(self, device: torch.device) -> None:
        """Check dtypes and places.

        Args:
            device: Of the other arguments.

        Raises:
            TypeError: One has another dtype or more than one element.
            ValueError: One is on another device, or must not be written.
        """
        for name, tensor in self.given():
            check_tensor(name, tensor)
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise TypeError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}: pass one float32, "
                    "torch.zeros((), device=...)"
                )
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device} but the tensors are on {device}")
            check_writable(name, tensor)

    def check_apart(self, others: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ValueError if one shares memory with another argument.

        Args:
            others: Name and tensor of each.
        """
        mine = list(self.given())
        if mine:
            for other_name, other in others:
                for name, tensor in mine:
                    check_no_overlap(name, tensor, other_name, other)
