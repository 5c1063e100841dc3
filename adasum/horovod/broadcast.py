"""Horovod's broadcast functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adasum.handle import Handle
from adasum.horovod.arguments import copied, dense
from adasum.horovod.autograd import backward_name, recorded, refuse_gradient
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
    """
    group, root = group_and_root(process_set, root_rank)

    def forward(tensor: Tensor) -> Any:
        return _start(group, root, name, copied(tensor)).wait(), backward

    def backward(gradient: Tensor) -> list[Tensor]:
        whole = copied(gradient)
        group.all_reduce(whole, Average, name=backward_name(name))
        return [whole if group.rank == root else torch.zeros_like(whole)]

    return recorded(forward, tensor)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start a `broadcast` without gradients; `synchronize` returns its result."""
    refuse_gradient("broadcast", tensor)
    return broadcast_async_(copied(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Overwrite the contiguous tensor with that of the root, and return it."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start a `broadcast_`; the tensor must not be used until `synchronize`."""
    return _start(*group_and_root(process_set, root_rank), name, tensor)


def _start(group: Group, root: int, name: str | None, tensor: Tensor) -> Handle:
    work = group.broadcast(dense(tensor).detach(), root=root, name=name, async_op=True)
    return Handle([work], lambda _: tensor)
