"""What a user of plain torch would write instead of each kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate, without alignment."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of an unaligned buffer back, in one foreach call."""
    pieces = buffer.split([tensor.numel() for tensor in tensors])
    views = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)


def sum_n(tensors: Sequence[Tensor]) -> Tensor:
    """A chain of adds, in the tensors' own dtype."""
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total += tensor
    return total


def scaled_add(a: Tensor, b: Tensor, alpha: float, beta: float) -> Tensor:
    """Two torch calls."""
    return torch.add(a * alpha, b, alpha=beta)


def dot_and_norms(a: Tensor, b: Tensor) -> Tensor:
    """Three dots in the tensors' own dtype, less exact than the kernel's."""
    return torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """The formula, for one segment."""
    dot, norm_a, norm_b = dot_and_norms(a, b)
    return (1 - dot / (2 * norm_a)) * a + (1 - dot / (2 * norm_b)) * b
