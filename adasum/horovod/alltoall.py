"""Horovod's alltoall functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from adasum.handle import Handle
from adasum.horovod.arguments import contiguous
from adasum.horovod.autograd import backward_name, with_gradient
from adasum.horovod.names import start_named
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Group

_Splits: TypeAlias = Sequence[int] | Tensor | None


def alltoall(
    tensor: Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the tensor to every rank; return the rows received, in rank order.

    Gradients flow back to the rows that were sent.

    Args:
        tensor: Its rows (dimension 0) are sent, the first ones to rank 0.
        splits: How many rows each rank is sent; equally many unless given.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        The rows; with `splits`, a pair of the rows and how many each rank sent.

    Examples:
        >>> hvd.init()
        >>> hvd.alltoall(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    rows, received = alltoall_async(tensor, splits, name, process_set).wait()
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[tuple[Tensor, Tensor]]:
    """Start an `alltoall`.

    `synchronize` returns a pair of the rows and how many each rank sent.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.alltoall_async(torch.tensor([1, 2])))
        (tensor([1, 2]), tensor([2], dtype=torch.int32))
    """
    group = require_group(process_set)
    handle = _start(group, splits, name, tensor)
    mine = tensor.shape[0]

    def backward(received: Tensor, gradient: Tensor, _: Tensor) -> list[Tensor]:
        sent, _ = _start(group, received, backward_name(name), gradient).wait()
        return [torch.cat([sent, sent.new_zeros(mine - len(sent), *sent.shape[1:])])]

    return with_gradient(handle, lambda result: partial(backward, result[1]), tensor)


def _start(
    group: Group, splits: _Splits, name: str | None, tensor: Tensor
) -> Handle[tuple[Tensor, Tensor]]:
    start = partial(group.all_to_all, contiguous(tensor), splits, name=name, async_op=True)
    work = start_named("alltoall", name, group, start)
    # Horovod counts in int32 unless a tensor of splits has another dtype.
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

    def finish(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, counts = result
        # Others may send more rows than a dtype of one byte counts.
        fits = int(counts.max()) <= torch.iinfo(like.dtype).max
        return rows, counts.to(like.device, like.dtype if fits else torch.int64)

    return Handle([work], finish)
