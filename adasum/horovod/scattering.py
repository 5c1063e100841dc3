"""Horovod's alltoall and reducescatter, and its functions on lists beside grouped_allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.gathering import allgather, allgather_async
from adasum.horovod.handles import (
    Handle,
    backward_name,
    contiguous,
    copied,
    differentiable,
    listed,
    operation,
    refuse_gradient,
    together,
)
from adasum.horovod.process_sets import ProcessSet, members_of
from collectives import Average, Group, Reducer, Sum, validation

__all__ = [
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

_Splits = Sequence[int] | Tensor | None


def alltoall(
    tensor: Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows of the tensor to every rank; a new tensor of those that came, in rank order.

    splits: how many rows go to each rank, the first ones to rank 0; equally many unless given. With
    splits the answer is (rows, how many came from each rank). Gradients flow back to the rows.
    """
    group = members_of(process_set)
    if differentiable(tensor):
        rows, received = _Alltoall.apply(group, splits, name, tensor)
    else:
        rows, received = _alltoall(group, splits, name, tensor).wait()
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Tensor,
    splits: _Splits = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `alltoall`, without gradients; `synchronize` gives (rows, how many from each rank)."""
    refuse_gradient("alltoall", tensor)
    return _alltoall(members_of(process_set), splits, name, tensor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced tensor: rows are dealt out evenly, lower ranks get the rest.

    Gradients flow through Sum and Average, scaled as Horovod does it: the gathered gradients of the
    answers for Average and size times those for Sum, which is size times the derivative of the sum
    of the ranks' losses. NotImplementedError for a gradient through another op.
    """
    op = operation(op)
    group = members_of(process_set)
    scales = (prescale_factor, postscale_factor)
    if not differentiable(tensor):
        reduced: Tensor = _reducescatter(group, name, compression, op, scales, tensor).wait()
        return reduced
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"gradients through reducescatter with op={op} are not supported: pass tensor.detach()"
        )
    answer: Tensor = _Reducescatter.apply(group, name, compression, op, scales, tensor)
    return answer


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter`, without gradients; the answer comes from `synchronize`."""
    refuse_gradient("reducescatter", tensor)
    group, scales = members_of(process_set), (prescale_factor, postscale_factor)
    return _reducescatter(group, name, Compression.none, operation(op), scales, tensor)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each tensor."""
    rest = (compression, op, process_set, prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, _numbered(name, i), *rest) for i, tensor in enumerate(listed(tensors))
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter_async` of each tensor; the list of answers comes from `synchronize`."""
    rest = (op, process_set, prescale_factor, postscale_factor)
    return together(
        [
            reducescatter_async(tensor, _numbered(name, i), *rest)
            for i, tensor in enumerate(listed(tensors))
        ]
    )


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """`allgather` of each tensor."""
    return [
        allgather(tensor, _numbered(name, i), process_set)
        for i, tensor in enumerate(listed(tensors))
    ]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """`allgather_async` of each tensor; the list of answers comes from `synchronize`."""
    return together(
        [
            allgather_async(tensor, _numbered(name, i), process_set)
            for i, tensor in enumerate(listed(tensors))
        ]
    )


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: _Splits, name: str | None, tensor: Tensor) -> Any:
        rows, received = _alltoall(group, splits, name, tensor).wait()
        ctx.group, ctx.received, ctx.name = group, received, backward_name(name)
        ctx.unsent = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back, _ = _alltoall(ctx.group, ctx.received, ctx.name, gradients[0]).wait()
        unsent = back.new_zeros(ctx.unsent - len(back), *back.shape[1:])
        return None, None, None, torch.cat([back, unsent])


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        name: str | None,
        compression: type[Compressor],
        op: Reducer,
        scales: tuple[float, float],
        tensor: Tensor,
    ) -> Any:
        ctx.group, ctx.name = group, backward_name(name)
        ctx.factor = scales[0] * scales[1] * (group.size if op is Sum else 1)
        return _reducescatter(group, name, compression, op, scales, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = ctx.group.all_gather(gradients[0].contiguous(), name=ctx.name)
        return None, None, None, None, None, whole * ctx.factor


def _alltoall(group: Group, splits: _Splits, name: str | None, tensor: Tensor) -> Handle:
    work = group.all_to_all(contiguous(tensor), splits, name=name, async_op=True)
    # Horovod's counts are int32 unless a tensor says otherwise.
    kind = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    return Handle(work, lambda answer: (answer[0], answer[1].to(kind)))


def _reducescatter(
    group: Group,
    name: str | None,
    compression: type[Compressor],
    op: Reducer,
    scales: tuple[float, float],
    tensor: Tensor,
) -> Handle:
    require_compressor(compression)
    validation.scale("prescale_factor", scales[0])
    validation.scale("postscale_factor", scales[1])
    short, ctx = compression.compress(copied(tensor))
    if scales[0] != 1.0:
        short = short * scales[0]
    work = group.reduce_scatter(short, op, by_rows=True, name=name, async_op=True)

    def finish(answer: Tensor) -> Tensor:
        return compression.decompress(answer if scales[1] == 1.0 else answer * scales[1], ctx)

    return Handle(work, finish)


def _numbered(name: str | None, i: int) -> str | None:
    return None if name is None else f"{name}.{i}"
