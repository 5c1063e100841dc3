"""Horovod's functions that reduce tensors: allreduce and its kin, and barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.handles import (
    Handle,
    backward_name,
    checked,
    copied,
    differentiable,
    listed,
    operation,
    refuse_gradient,
)
from adasum.horovod.process_sets import ProcessSet, members_of
from collectives import Group, Reducer

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


class _Options(NamedTuple):
    """What an all-reduce has beside its tensors."""

    group: Group
    op: Reducer
    name: str | None
    compression: type[Compressor]
    prescale: float
    postscale: float


def barrier(process_set: ProcessSet | None = None) -> None:
    """Returns once every rank of the set has called it."""
    members_of(process_set).barrier()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """A new tensor: the tensor of every rank reduced by `op` (Average unless given).

    With op=Adasum the whole tensor is one segment. `average` is Horovod's deprecated way to say
    Average (True) or Sum (False). Gradients flow, on all ranks or on none: that of the answer is
    reduced in the same way, also by Adasum, where that is not the derivative but what Horovod does.
    process_set: whose ranks take part, all unless given. Collective; TypeError, ValueError for bad
    arguments, and on a rank that is not in the set.
    """
    op = operation(op, average)
    group = members_of(process_set)
    options = _Options(group, op, name, compression, prescale_factor, postscale_factor)
    return _reduce(options, [tensor])[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `allreduce`, without gradients; the answer comes from `synchronize`."""
    op = operation(op, average)
    refuse_gradient("allreduce", tensor)
    group = members_of(process_set)
    options = _Options(group, op, name, Compression.none, prescale_factor, postscale_factor)
    handle = _start(options, [tensor])
    return Handle(handle, lambda tensors: tensors[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """As `allreduce`, in place on a contiguous tensor, which is returned."""
    return allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `allreduce_`; the tensor must not be touched until `synchronize`."""
    handle = grouped_allreduce_async_(
        [tensor], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return Handle(handle, lambda tensors: tensors[0])


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """As `allreduce` of each tensor (Adasum: each its own segment), packed into few messages."""
    op = operation(op, average)
    group = members_of(process_set)
    options = _Options(group, op, name, compression, prescale_factor, postscale_factor)
    return _reduce(options, listed(tensors))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `grouped_allreduce`; the list of answers comes from `synchronize`."""
    op = operation(op, average)
    given = listed(tensors)
    refuse_gradient("grouped_allreduce", *given)
    group = members_of(process_set)
    options = _Options(group, op, name, Compression.none, prescale_factor, postscale_factor)
    return _start(options, given)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """As `grouped_allreduce`, in place on contiguous tensors, which are returned."""
    return grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As `grouped_allreduce_`; the tensors must not be touched until `synchronize`."""
    op = operation(op, average)
    given = listed(tensors)
    work = members_of(process_set).grouped_all_reduce(
        # In place on a parameter is meant to change its value, not to be recorded by autograd.
        [checked(tensor).detach() for tensor in given],
        op,
        name=name,
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(work, lambda _: given)


class _Reduce(torch.autograd.Function):
    """A grouped all-reduce whose gradients are reduced in the same way.

    For Sum and Average that is the derivative: each rank's loss depends on every rank's tensor by
    the same scales. For Adasum it is not (its coefficients depend on the tensors too); Horovod
    does the same.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(_start(options, tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Integers have no gradient, on any rank.
        real = [g for g in gradients if g.is_floating_point() or g.is_complex()]
        options = ctx.options._replace(name=backward_name(ctx.options.name))
        reduced = iter(_reduce(options, real))
        return None, *(next(reduced) if any(g is r for r in real) else None for g in gradients)


def _reduce(options: _Options, tensors: Sequence[Tensor]) -> list[Tensor]:
    if differentiable(*tensors):
        return list(_Reduce.apply(options, *tensors))
    answer: list[Tensor] = _start(options, tensors).wait()
    return answer


def _start(options: _Options, tensors: Sequence[Tensor]) -> Handle:
    """An out-of-place grouped all-reduce; its answer is the list of decompressed tensors."""
    compression = options.compression
    require_compressor(compression)
    wire: list[Tensor] = []
    contexts: list[Any] = []
    for tensor in tensors:
        short, ctx = compression.compress(copied(tensor))
        wire.append(short)
        contexts.append(ctx)
    work = options.group.grouped_all_reduce(
        wire,
        options.op,
        name=options.name,
        prescale=options.prescale,
        postscale=options.postscale,
        async_op=True,
    )
    return Handle(
        work,
        lambda answer: [
            compression.decompress(short, ctx) for short, ctx in zip(answer, contexts, strict=True)
        ],
    )
