"""Horovod's functions that move tensors between ranks: allgather and broadcast.

Gradients are scaled as Horovod (0.22 and later) scales them: what reaches a rank's tensor is the
average over the ranks of the gradients of their losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adasum.horovod.handles import (
    Handle,
    backward_name,
    checked,
    contiguous,
    copied,
    differentiable,
    refuse_gradient,
)
from adasum.horovod.process_sets import ProcessSet, members_of, root_of
from collectives import Average, Group

__all__ = [
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """The tensors of all ranks, joined along dimension 0, where their sizes may differ.

    Gradients flow: a rank's tensor gets its rows of the average of the answers' gradients.
    """
    group = members_of(process_set)
    if differentiable(tensor):
        answer: Tensor = _Allgather.apply(group, name, tensor)
        return answer
    gathered: Tensor = _gather(group, name, tensor).wait()
    return gathered


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """As `allgather`, without gradients; the answer comes from `synchronize`."""
    refuse_gradient("allgather", tensor)
    return _gather(members_of(process_set), name, tensor)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """A new tensor on every rank: the one of `root_rank`, a global rank.

    Gradients flow: the root's tensor gets the average of the answers' gradients, others get zeros.
    """
    group, root = members_of(process_set), root_of(process_set, root_rank)
    if differentiable(tensor):
        answer: Tensor = _Broadcast.apply(group, root, name, tensor)
        return answer
    received: Tensor = _broadcast(group, root, name, copied(tensor)).wait()
    return received


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `broadcast`, without gradients; the answer comes from `synchronize`."""
    refuse_gradient("broadcast", tensor)
    return broadcast_async_(copied(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Overwrites the contiguous tensor with that of `root_rank`, and returns it."""
    answer: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return answer


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `broadcast_`; the tensor must not be touched until `synchronize`."""
    return _broadcast(members_of(process_set), root_of(process_set, root_rank), name, tensor)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, name: str | None, tensor: Tensor) -> Any:
        answer = _gather(group, name, tensor).wait()
        ctx.group, ctx.name, ctx.rows = group, backward_name(name), tensor.shape[0]
        return answer

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = _gather(ctx.group, None, torch.tensor([ctx.rows], device="cpu")).wait().tolist()
        whole = copied(gradients[0])
        ctx.group.all_reduce(whole, Average, name=ctx.name)
        return None, None, whole.narrow(0, sum(rows[: ctx.group.rank]), ctx.rows)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, tensor: Tensor) -> Any:
        ctx.group, ctx.root, ctx.name = group, root, backward_name(name)
        return _broadcast(group, root, name, copied(tensor)).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = copied(gradients[0])
        ctx.group.all_reduce(gradient, Average, name=ctx.name)
        mine = gradient if ctx.group.rank == ctx.root else torch.zeros_like(gradient)
        return None, None, None, mine


def _gather(group: Group, name: str | None, tensor: Tensor) -> Handle:
    work = group.all_gather(contiguous(tensor), name=name, async_op=True)
    return Handle(work, lambda answer: answer)


def _broadcast(group: Group, root: int, name: str | None, tensor: Tensor) -> Handle:
    work = group.broadcast(checked(tensor).detach(), root=root, name=name, async_op=True)
    return Handle(work, lambda _: tensor)
