"""Horovod's broadcast functions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from adasum.handle import Handle
from adasum.horovod.arguments import copied, dense
from adasum.horovod.autograd import backward_name, refuse_recorded, with_gradient
from adasum.horovod.names import start_named
from adasum.horovod.process_sets import ProcessSet, group_and_root
from collectives import Average, Group


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Return a new tensor on every rank, equal to that of the root.

    Gradients flow, scaled as Horovod (0.22 and later) does it: the root's tensor receives the
    average over the ranks of the result's gradient, the other ranks' tensors receive zeros.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed.
        root_rank: The root's global rank.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Examples:
        >>> hvd.init()
        >>> hvd.broadcast(torch.ones(2), root_rank=0)
        tensor([1., 1.])
    """
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Start a `broadcast`; `synchronize` returns its result.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.broadcast_async(torch.ones(2), root_rank=0))
        tensor([1., 1.])
    """
    group, root = group_and_root(process_set, root_rank)

    def backward(gradient: Tensor) -> list[Tensor]:
        whole = copied(gradient)
        group.all_reduce(whole, Average, name=backward_name(name))
        return [whole if group.rank == root else torch.zeros_like(whole)]

    return with_gradient(_start(group, root, name, copied(tensor)), lambda _: backward, tensor)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Overwrite the contiguous tensor with that of the root, and return it.

    Raises:
        NotImplementedError: autograd has recorded how the tensor was made.

    Examples:
        >>> hvd.init()
        >>> hvd.broadcast_(torch.ones(2), root_rank=0)
        tensor([1., 1.])
    """
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Start a `broadcast_`; the tensor must not be used until `synchronize`.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.broadcast_async_(torch.ones(2), root_rank=0))
        tensor([1., 1.])
    """
    refuse_recorded("broadcast_", tensor)
    return _start(*group_and_root(process_set, root_rank), name, tensor)


def _start(group: Group, root: int, name: str | None, tensor: Tensor) -> Handle[Tensor]:
    sent = dense(tensor).detach()
    start = partial(group.broadcast, sent, root=root, name=name, async_op=True)
    return Handle([start_named("broadcast", name, group, start)], lambda _: tensor)
