"""Horovod's broadcast functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adasum.horovod.arguments import backward_name, copied, dense, differentiable, refuse_gradient
from adasum.horovod.handle import Handle
from adasum.horovod.process_sets import ProcessSet, require_group, root_in
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
    group, root = require_group(process_set), root_in(process_set, root_rank)
    if differentiable(tensor):
        result: Tensor = _Broadcast.apply(group, root, name, tensor)
        return result
    received: Tensor = _start(group, root, name, copied(tensor)).wait()
    return received


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
    result: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start a `broadcast_`; the tensor must not be used until `synchronize`."""
    return _start(require_group(process_set), root_in(process_set, root_rank), name, tensor)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, tensor: Tensor) -> Any:
        ctx.group, ctx.root, ctx.name = group, root, backward_name(name)
        return _start(group, root, name, copied(tensor)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = copied(gradients[0])
        ctx.group.all_reduce(gradient, Average, name=ctx.name)
        mine = gradient if ctx.group.rank == ctx.root else torch.zeros_like(gradient)
        return None, None, None, mine


def _start(group: Group, root: int, name: str | None, tensor: Tensor) -> Handle:
    work: Any = group.broadcast(dense(tensor).detach(), root=root, name=name, async_op=True)
    return Handle(work, lambda _: tensor)
