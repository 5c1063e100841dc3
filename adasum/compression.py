"""Compression of what travels: gradients or deltas cast to a shorter float for the wire."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["LONG", "Compression", "Compressor", "require_compressor"]


class Compressor(Protocol):
    """What a compression must offer; Horovod's interface, so that a user's own class fits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """The tensor to send, and what `decompress` needs to undo it."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """The tensor in the form it had before `compress`."""
        ...


def require_compressor(compression: Any) -> None:
    """TypeError for what has not the two methods of a Compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression must have compress and decompress, not {compression!r}")


class _NoneCompressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor


# Between float16 and bfloat16 a cast would lose bits or range and send as many bytes.
LONG = (torch.float32, torch.float64)


class _CastCompressor:
    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        if tensor.dtype not in LONG:
            return tensor, None
        return tensor.to(cls.wire), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _FP16Compressor(_CastCompressor):
    wire = torch.float16


class _BF16Compressor(_CastCompressor):
    wire = torch.bfloat16


class Compression:
    """`none` sends tensors as they are; `fp16` and `bf16` send float32 and float64 in 2 bytes.

    Averages of float16 can overflow before the division: use bf16, or `gradient_predivide_factor`.
    """

    none = _NoneCompressor
    fp16 = _FP16Compressor
    bf16 = _BF16Compressor
