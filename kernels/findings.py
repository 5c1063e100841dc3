"""What a function reports of the values it writes, beside its output.

One field of `Findings` is one optional argument of every function that writes. Its check and
its order are here; `report` in kernels/gpu/tiles.py, in
kernels/cpu/native.c and in kernels/cpu/torch_fallback.py finds its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.arithmetic import compute_dtype
from kernels.validation import check_tensor, check_writable


class Findings(NamedTuple):
    """Tensors of one element that a function writes beside its output, None where not asked for.

    The order of the fields is that of the arguments of operators, of the struct in C and of the
    tuple that a Triton kernel takes.

    Attributes:
        found_inf: float32, set to 1 where a value written is Inf or NaN, else left, as torch's
            GradScaler has it.
        max_abs: float64 where a tensor written is, else float32; set to the largest magnitude
            written, NaN if any is, 0 where nothing is written. The same bits every time, whatever
            the order in which values are looked at.
    """

    found_inf: Tensor | None = None
    max_abs: Tensor | None = None

    def given(self) -> list[tuple[str, Tensor]]:
        """Return the name and tensor of those asked for."""
        if {*self} == {None}:
            return []
        named = zip(self._fields, self, strict=False)
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def check(self, device: torch.device, *written: torch.dtype) -> None:
        """Check dtypes and devices.

        Args:
            device: Of the other arguments.
            written: Dtypes of the tensors written.

        Raises:
            TypeError: One has another dtype or more than one element.
            ValueError: One is on another device, or must not be written.
        """
        for name, tensor in self.given():
            dtype = compute_dtype(*written) if name == "max_abs" else torch.float32
            check_tensor(name, tensor)
            if tensor.dtype != dtype or tensor.numel() != 1:
                kind = str(dtype).removeprefix("torch.")
                raise TypeError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}: pass one {kind}, "
                    f"torch.zeros((), dtype={dtype}, device=...)"
                )
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device} but the tensors are on {device}")
            check_writable(name, tensor)

    def reset_before(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return `run`, with what only rises set back first."""
        if self.max_abs is None:
            return run
        largest = self.max_abs.detach()

        def reset_and_run(*scalars: float) -> None:
            largest.zero_()
            run(*scalars)

        return reset_and_run


# As operators have them; `a` is what else they write.
SCHEMA = ", ".join(
    f"Tensor({letter}!)? {name}" for letter, name in zip("bcdefg", Findings._fields, strict=False)
)


def max_abs_reference(written: Sequence[Tensor]) -> Tensor:
    """Return what `max_abs` is set to by a function that writes these tensors: float64, 0-D."""
    magnitudes = [tensor.detach().double().abs().amax() for tensor in written if tensor.numel()]
    return torch.stack(magnitudes).amax() if magnitudes else torch.zeros((), dtype=torch.float64)
