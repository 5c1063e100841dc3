"""Short descriptions of parameters and settings, for ranks to compare: equal for equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from adasum.optimizer.planning import Named

Setting: TypeAlias = tuple[str, str]

# Words per row. A prime, so that no usual width is a multiple of it: if two layers, rows or columns
# of a matrix are exchanged, their words come into other columns.
_WIDTH = 509
# Rows that are summed at once. On the CPU few enough that their copies stay in its cache, and that
# torch starts no other thread; on a GPU their copies take 16 MiB.
_CPU_ROWS, _GPU_ROWS = 64, 4096
# Nesting of lists and dicts: deeper than any optimizer's. A limit, since a list may hold itself.
_MAX_DEPTH = 8


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
    """Return whether it is a plain tensor with memory: not lazy, sparse, fake or a DTensor."""
    return type(parameter) in (Tensor, torch.nn.Parameter) and (
        parameter.layout is torch.strided and not parameter.is_meta
    )


def _shorten(tensor: Tensor) -> Tensor:
    """Return a few KiB that depend on every bit of a tensor, on its device: uint8 [n].

    The bytes are int64 words in rows of `_WIDTH`. The result has the sums of the columns modulo
    2**64, and of the words' upper halves, as two changes of the top bit cancel out in the former.
    The bytes after the last row, so all of a small tensor, are appended unchanged. Integer sums do
    not depend on the device, the number of threads or the order.
    """
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    raw = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    count = raw.numel() // (8 * _WIDTH)
    if not count:
        return raw
    head, tail = raw[: count * 8 * _WIDTH], raw[count * 8 * _WIDTH :]
    if head.data_ptr() % 8:
        # A view of words must be aligned.
        head = head.clone()
    sums = torch.zeros(2, _WIDTH, dtype=torch.int64, device=raw.device)
    whole, upper = sums
    words = head.view(torch.int64).view(count, _WIDTH)
    for rows in words.split(_CPU_ROWS if raw.is_cpu else _GPU_ROWS):
        whole += rows.sum(0)
        upper += (rows >> 32).sum(0)
    return torch.cat([sums.view(-1).view(torch.uint8), tail])


def setting_name(key: str, group: int) -> str:
    """Return the name of an entry of a parameter group."""
    return f"{key} of group {group}"


def describe_hyperparameters(optimizer: torch.optim.Optimizer, kind: type) -> list[Setting]:
    """Return (name, value) of the optimizer's class, and of its groups' entries but parameters.

    Numbers, strings and tensors are described by value, other objects by class. `kind` is the
    optimizer's class before it was wrapped.
    """
    rows = [("the optimizer's class", f"{kind.__module__}.{kind.__qualname__}")]
    for i, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        rows += [
            (setting_name(key, i), describe_value(values[key])) for key in sorted(values, key=str)
        ]
    return rows


def describe_value(value: Any, depth: int = 0) -> str:
    """Return a text for a value, the same for equal values on every rank.

    Values nested too deeply, as in a list that holds itself, become "...".
    """
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe_value(each, depth + 1) for each in value)}]"
    if isinstance(value, Mapping):
        keys = sorted(value, key=str)
        return f"{{{', '.join(f'{k!r}: {describe_value(value[k], depth + 1)}' for k in keys)}}}"
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**53):
        # 1 and 1.0 are the same learning rate; 0.0 and -0.0 as well.
        value = float(value) + 0.0
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_tensor(tensor: Tensor) -> str:
    if tensor.numel() == 1 and tensor.layout is torch.strided and not tensor.is_meta:
        return repr(tensor.item())
    described = describe_parameters([("", tensor)])
    return " ".join(described[0][1:]) if described else describe_shape(tensor)
