"""Optional outputs: findings of a function about the values that it writes.

Each field of `Findings` is an optional argument of every function that writes. This file has their
order and their checks; `report` in kernels/gpu/tiles.py, kernels/cpu/native.c and
kernels/cpu/torch_fallback.py finds their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.validation import check_each, check_tensor, check_writable, read_list


class Findings(NamedTuple):
    """Tensors of one element that a function writes in addition to its output; None if not wanted.

    Operators, the struct in C and the tuple for a Triton kernel have them in this order.

    Attributes:
        found_inf: float32, set to 1 if a value written is Inf or NaN, otherwise not changed, as
            torch's GradScaler needs it.
        max_abs: float64 if a tensor written is, otherwise float32; set to the largest magnitude
            written, NaN if one is NaN, 0 if nothing is written. Its bits do not depend on the
            order of visiting the values.
    """

    found_inf: Tensor | None = None
    max_abs: Tensor | None = None

    def given(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of those that are wanted."""
        if self.found_inf is None and self.max_abs is None:
            return []
        named = zip(self._fields, self, strict=False)
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def check(self, device: torch.device, *written: torch.dtype) -> None:
        """Check dtypes and devices.

        Args:
            device: The device of the other arguments.
            written: The dtypes of the tensors written.

        Raises:
            TypeError: A tensor has another dtype or more than one element.
            ValueError: A tensor is on another device, or must not be written.
        """
        for name, tensor in self.given():
            dtype = compute_dtype(*written) if name == "max_abs" else torch.float32
            fits = isinstance(tensor, Tensor) and tensor.dtype == dtype and tensor.numel() == 1
            # A nested tensor has no shape to name: the check below refuses it.
            if isinstance(tensor, Tensor) and not (fits or tensor.is_nested):
                kind = str(dtype).removeprefix("torch.")
                raise TypeError(
                    f"{name} must be one {kind}, torch.zeros((), dtype={dtype}, device=...), got "
                    f"shape {tuple(tensor.shape)} {tensor.dtype}"
                )
            check_tensor(name, tensor)
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device} but the tensors are on {device}")
            check_writable(name, tensor)

    def reset_before(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return a function that sets `max_abs`, which a run only raises, to 0 and calls `run`."""
        if self.max_abs is None:
            return run
        largest = self.max_abs.detach()

        def reset_and_run(*scalars: float) -> None:
            largest.zero_()
            run(*scalars)

        return reset_and_run


def max_abs_reference(written: Sequence[Tensor]) -> Tensor:
    """Return the `max_abs` of a function that writes these tensors: float64, 0-D.

    Examples:
        >>> kernels.max_abs_reference([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
        tensor(3., dtype=torch.float64)
    """
    checked = check_each("written", read_list("written", written))
    magnitudes = [tensor.detach().double().abs().amax() for tensor in checked if tensor.numel()]
    return torch.stack(magnitudes).amax() if magnitudes else torch.zeros((), dtype=torch.float64)
