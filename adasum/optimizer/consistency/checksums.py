"""Checksums of parameters: whether ranks have the same bits, by a few bytes for each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from adasum.optimizer.planning import Named

# Words of a row. A prime: what two layers, rows or columns of a matrix have exchanged comes into
# other columns, since no usual width is a multiple of it.
_WIDTH = 509
# Rows that are summed at once: on the CPU those whose copies stay in its cache, and for which torch
# starts no other thread; on a GPU those whose copies take 16 MiB.
_CPU_ROWS, _GPU_ROWS = 64, 4096


@torch.no_grad()
def describe_parameters(named: Sequence[Named]) -> list[list[str]]:
    """Return each parameter's name, its dtype and shape, and a checksum."""
    compared = [(name, each.detach()) for name, each in named if has_bits(each)]
    digests: list[bytes] = [b""] * len(compared)
    devices: dict[torch.device, list[int]] = {}
    for i, (_, tensor) in enumerate(compared):
        devices.setdefault(tensor.device, []).append(i)
    for indices in devices.values():
        short = [_shorten(compared[i][1]) for i in indices]
        # One copy from each device.
        whole = torch.cat(short).cpu()
        parts = whole.split([each.numel() for each in short])
        for i, part in zip(indices, parts, strict=True):
            digests[i] = hashlib.blake2b(part.numpy(), digest_size=8).digest()
    return [
        [name, describe_shape(tensor), digest.hex()]
        for (name, tensor), digest in zip(compared, digests, strict=True)
    ]


def describe_shape(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def has_bits(parameter: Tensor) -> bool:
    """Return whether it has memory of its own: no lazy, sparse or fake one, and no DTensor."""
    return type(parameter) in (Tensor, torch.nn.Parameter) and (
        parameter.layout is torch.strided and not parameter.is_meta
    )


def _shorten(tensor: Tensor) -> Tensor:
    """Return a few KiB that depend on every bit of a tensor, on its device: uint8 [n].

    The bytes as int64 words, in rows of `_WIDTH`: the columns' sums modulo 2**64, and those of the
    words' upper halves, as two changes of the top bit cancel out in the first. What is left behind
    the last row, so all of a small tensor, stays as it is. Integer sums do not depend on the
    device, the number of threads or the order.
    """
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    raw = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    count = raw.numel() // (8 * _WIDTH)
    if not count:
        return raw
    head, tail = raw[: count * 8 * _WIDTH], raw[count * 8 * _WIDTH :]
    if head.data_ptr() % 8:
        # A view of words has to begin at one.
        head = head.clone()
    sums = torch.zeros(2, _WIDTH, dtype=torch.int64, device=raw.device)
    whole, upper = sums
    words = head.view(torch.int64).view(count, _WIDTH)
    for rows in words.split(_CPU_ROWS if raw.is_cpu else _GPU_ROWS):
        whole += rows.sum(0)
        upper += (rows >> 32).sum(0)
    return torch.cat([sums.view(-1).view(torch.uint8), tail])
