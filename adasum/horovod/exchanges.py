"""Horovod's functions that move tensors: allgather, broadcast and alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adasum.handle import Handle
from adasum.horovod.arguments import (
    contiguous,
    copied,
    dense,
    start_each,
    start_named,
    waiting_for,
    with_arguments_of,
    with_tensors_for,
)
from adasum.horovod.autograd import backward_name, refuse_recorded, with_gradient
from adasum.horovod.process_sets import ProcessSet, group_and_root, require_group
from collectives import Average, Group

_Splits: TypeAlias = Sequence[int] | Tensor | None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Concatenate the tensors of all ranks along dimension 0, in rank order.

    Gradients flow, scaled as in Horovod (0.22 and later): each rank's tensor receives its rows of
    the average of the result's gradients.

    Args:
        tensor: The size of dimension 0 may differ between ranks; dtype and other sizes must agree.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Examples:
        >>> hvd.init()
        >>> hvd.allgather(torch.ones(1, 2))  # of one rank
        tensor([[1., 1.]])
        >>> hvd.synchronize(hvd.allgather_async(torch.ones(1, 2)))
        tensor([[1., 1.]])
        >>> hvd.grouped_allgather([torch.ones(1), torch.zeros(2)])
        [tensor([1.]), tensor([0., 0.])]
    """
    return allgather_async(tensor, name, process_set).wait()


@with_arguments_of(allgather)
def allgather_async(
    tensor: Tensor, name: str | None, process_set: ProcessSet | None
) -> Handle[Tensor]:
    """Start an `allgather`; `synchronize` returns its result."""
    group = require_group(process_set)
    handle = start_named("allgather", group, name, group.all_gather, contiguous(tensor))
    mine = tensor.shape[0]

    def backward(gradient: Tensor) -> list[Tensor]:
        rows: Any = group.all_gather(torch.tensor([mine], device="cpu"))
        whole = copied(gradient)
        group.all_reduce(whole, Average, name=backward_name(name))
        return [whole.narrow(0, sum(rows.tolist()[: group.rank]), mine)]

    return with_gradient(handle, lambda _: backward, tensor)


@with_tensors_for(allgather)
def grouped_allgather_async(**given: Any) -> Handle[list[Tensor]]:
    """Start an `allgather` of each tensor of a list; `synchronize` returns the list of results."""
    return start_each(allgather_async, **given)


grouped_allgather = waiting_for(grouped_allgather_async)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Return a new tensor on every rank, equal to the root's.

    Gradients flow, scaled as in Horovod (0.22 and later): the root's tensor receives the average
    of the result's gradients, the other ranks' tensors receive zeros.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed.
        root_rank: The root's global rank.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Examples:
        >>> hvd.init()
        >>> hvd.broadcast(torch.ones(2), root_rank=0)
        tensor([1., 1.])
        >>> hvd.synchronize(hvd.broadcast_async_(torch.ones(2), root_rank=0))
        tensor([1., 1.])
    """
    return broadcast_async(tensor, root_rank, name, process_set).wait()


@with_arguments_of(broadcast)
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None
) -> Handle[Tensor]:
    """Start a `broadcast`; `synchronize` returns its result."""
    group, root = group_and_root(process_set, root_rank)

    def backward(gradient: Tensor) -> list[Tensor]:
        whole = copied(gradient)
        group.all_reduce(whole, Average, name=backward_name(name))
        return [whole if group.rank == root else torch.zeros_like(whole)]

    call = partial(group.broadcast, copied(tensor), root=root)
    handle = start_named("broadcast", group, name, call)
    return with_gradient(handle, lambda _: backward, tensor)


@with_arguments_of(broadcast)
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None
) -> Handle[Tensor]:
    """Start to overwrite a contiguous tensor by the root's; do not use it meanwhile.

    Raises NotImplementedError if the tensor is the result of an operation that autograd recorded.
    """
    refuse_recorded("broadcast_", tensor)
    group, root = group_and_root(process_set, root_rank)
    call = partial(group.broadcast, dense(tensor).detach(), root=root)
    return Handle([start_named("broadcast", group, name, call)], lambda _: tensor)


broadcast_ = waiting_for(broadcast_async_)


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
        splits: The number of rows for each rank; equal numbers by default.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        The rows; with `splits`, a pair of the rows and the number of rows from each rank.

    Examples:
        >>> hvd.init()
        >>> hvd.alltoall(torch.tensor([1, 2]))
        tensor([1, 2])
        >>> hvd.synchronize(hvd.alltoall_async(torch.tensor([1, 2])))
        (tensor([1, 2]), tensor([2], dtype=torch.int32))
    """
    rows, received = alltoall_async(tensor, splits, name, process_set).wait()
    return rows if splits is None else (rows, received)


@with_arguments_of(alltoall)
def alltoall_async(
    tensor: Tensor, splits: _Splits, name: str | None, process_set: ProcessSet | None
) -> Handle[tuple[Tensor, Tensor]]:
    """Start an `alltoall`; `synchronize` returns the rows and their number from each rank."""
    group = require_group(process_set)
    handle = _exchange(group, splits, name, tensor)
    mine = tensor.shape[0]

    def backward(received: Tensor, gradient: Tensor, _: Tensor) -> list[Tensor]:
        sent, _ = _exchange(group, received, backward_name(name), gradient).wait()
        return [torch.cat([sent, sent.new_zeros(mine - len(sent), *sent.shape[1:])])]

    return with_gradient(handle, lambda result: partial(backward, result[1]), tensor)


def _exchange(
    group: Group, splits: _Splits, name: str | None, tensor: Tensor
) -> Handle[tuple[Tensor, Tensor]]:
    work = start_named("alltoall", group, name, group.all_to_all, contiguous(tensor), splits)
    # Horovod counts in int32, or in the dtype of the splits if they are a tensor.
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

    def finish(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, counts = result
        # Others may send more rows than a one-byte dtype can hold.
        fits = int(counts.max()) <= torch.iinfo(like.dtype).max
        return rows, counts.to(like.device, like.dtype if fits else torch.int64)

    return Handle([work], finish)
