"""Compression of messages: gradients or differences are cast to a 2-byte dtype."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

# float16 and bfloat16 are sent as they are: a cast between them loses bits or range for nothing.
_CAST_DTYPES = (torch.float32, torch.float64)


class Compressor(Protocol):
    """The two methods of a compression, named as in Horovod, so that its users' classes work."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """Return the received tensor in the form it had before `compress`."""
        ...


def require_compressor(compression: Any) -> None:
    """Raise TypeError unless the object has both methods of a Compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression must have compress and decompress, got {compression!r}: pass "
            "Compression.none, Compression.fp16 or Compression.bf16"
        )


class _NoneCompressor:
    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        if cls.dtype is None or tensor.dtype not in _CAST_DTYPES:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype | None) -> Tensor:
        return tensor if context is None else tensor.to(context)


class _FP16Compressor(_NoneCompressor):
    dtype = torch.float16


class _BF16Compressor(_NoneCompressor):
    dtype = torch.bfloat16


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__name__} has no {name!r}: use none, fp16 or bf16")


class Compression(metaclass=_Named):
    """The compressions that come with the library.

    `none` sends tensors as they are. `fp16` and `bf16` send float32 and float64 in 2 bytes, and
    other dtypes, complex ones too, as they are. With fp16, values and results of Sum and Adasum
    beyond 65,504 become infinite. An average cannot overflow, but over many ranks it loses small
    values (see `Average`): prefer bf16 for it.

    Examples:
        >>> small, context = hvd.Compression.fp16.compress(torch.ones(2))
        >>> small.dtype, hvd.Compression.fp16.decompress(small, context).dtype
        (torch.float16, torch.float32)
    """

    none = _NoneCompressor
    fp16 = _FP16Compressor
    bf16 = _BF16Compressor


def cast_dtype(compression: type[Compressor], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that a compression casts tensors of `dtype` to; None if it does not."""
    ours = compression in (_FP16Compressor, _BF16Compressor) and dtype in _CAST_DTYPES
    return compression.dtype if ours else None  # type: ignore[attr-defined]
