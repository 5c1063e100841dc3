"""Horovod's allgather functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.horovod.arguments import (
    backward_name,
    contiguous,
    copied,
    differentiable,
    numbered,
    refuse_gradient,
    tensor_list,
)
from adasum.horovod.handle import Handle, wait_for_all
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Average, Group


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Concatenate the tensors of all ranks along dimension 0, in rank order.

    Gradients flow, scaled as Horovod (0.22 and later) does it: a rank's tensor receives its rows
    of the average over the ranks of the result's gradient.

    Args:
        tensor: May differ between the ranks in the size of dimension 0 only.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.
    """
    group = require_group(process_set)
    if differentiable(tensor):
        result: Tensor = _Allgather.apply(group, name, tensor)
        return result
    gathered: Tensor = _start(group, name, tensor).wait()
    return gathered


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start an `allgather` without gradients; `synchronize` returns its result."""
    refuse_gradient("allgather", tensor)
    return _start(require_group(process_set), name, tensor)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """`allgather` each tensor of a list."""
    return [
        allgather(tensor, numbered(name, i), process_set)
        for i, tensor in enumerate(tensor_list(tensors))
    ]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Start an `allgather_async` of each tensor; `synchronize` returns the list of results."""
    return wait_for_all(
        [
            allgather_async(tensor, numbered(name, i), process_set)
            for i, tensor in enumerate(tensor_list(tensors))
        ]
    )


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, name: str | None, tensor: Tensor) -> Any:
        result = _start(group, name, tensor).wait()
        ctx.group, ctx.name, ctx.rows = group, backward_name(name), tensor.shape[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = _start(ctx.group, None, torch.tensor([ctx.rows], device="cpu")).wait().tolist()
        whole = copied(gradients[0])
        ctx.group.all_reduce(whole, Average, name=ctx.name)
        return None, None, whole.narrow(0, sum(rows[: ctx.group.rank]), ctx.rows)


def _start(group: Group, name: str | None, tensor: Tensor) -> Handle:
    work: Any = group.all_gather(contiguous(tensor), name=name, async_op=True)
    return Handle(work, lambda result: result)
