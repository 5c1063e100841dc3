"""Horovod's allreduce functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import (
    ReductionOptions,
    backward_name,
    copied,
    dense,
    differentiable,
    operation,
    refuse_gradient,
    tensor_list,
)
from adasum.horovod.handle import Handle
from adasum.horovod.process_sets import ProcessSet, require_group
from adasum.sparse import SparseHandle, sparse_all_reduce_async
from collectives import Reducer


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
    """Return a new tensor: the reduction of the tensors of all ranks.

    Gradients flow, on all ranks or on none: the gradient of the result is reduced in the same way.
    For Sum and Average that is the derivative. For Adasum it is not, because its coefficients
    depend on the tensors too; Horovod does the same.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed.
        average: Horovod's deprecated way to ask for Average (True) or Sum (False).
        name: Names the collective in errors; equal on all ranks.
        compression: Casts what is sent.
        op: Sum, Average or Adasum, for which the whole tensor is one segment; Average unless given.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: An argument has the wrong type, or `op` does not take the tensor's dtype.
        ValueError: An argument has a bad value, or this rank is not in the process set.
    """
    op = operation(op, average)
    group = require_group(process_set)
    options = ReductionOptions(group, op, name, compression, prescale_factor, postscale_factor)
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
    """Start an `allreduce` without gradients; `synchronize` returns its result."""
    op = operation(op, average)
    refuse_gradient("allreduce", tensor)
    group = require_group(process_set)
    options = ReductionOptions(group, op, name, Compression.none, prescale_factor, postscale_factor)
    return Handle(_start(options, [tensor]), lambda tensors: tensors[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Do an `allreduce` in place on a contiguous tensor, which is returned."""
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
    """Start an `allreduce_`; the tensor must not be used until `synchronize`."""
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
    """`allreduce` each tensor of a list, packed into few messages.

    For Adasum each tensor is a segment of its own.
    """
    op = operation(op, average)
    group = require_group(process_set)
    options = ReductionOptions(group, op, name, compression, prescale_factor, postscale_factor)
    return _reduce(options, tensor_list(tensors))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Start a `grouped_allreduce` without gradients; `synchronize` returns the list of results."""
    op = operation(op, average)
    inputs = tensor_list(tensors)
    refuse_gradient("grouped_allreduce", *inputs)
    group = require_group(process_set)
    options = ReductionOptions(group, op, name, Compression.none, prescale_factor, postscale_factor)
    return _start(options, inputs)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """Do a `grouped_allreduce` in place on contiguous tensors, which are returned."""
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
    """Start a `grouped_allreduce_`; the tensors must not be used until `synchronize`."""
    op = operation(op, average)
    inputs = tensor_list(tensors)
    work: Any = require_group(process_set).grouped_all_reduce(
        # Detached: in place on a parameter changes its value and is not for autograd to record.
        [dense(tensor).detach() for tensor in inputs],
        op,
        name=name,
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(work, lambda _: inputs)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Reducer, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Start the reduction of a sparse tensor; calling the handle waits and returns the result.

    See `adasum.sparse.sparse_all_reduce_async`.
    """
    return sparse_all_reduce_async(require_group(process_set), tensor, op, name)


class _Reduce(torch.autograd.Function):
    """A grouped all-reduce whose gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, options: ReductionOptions, *tensors: Tensor) -> Any:
        ctx.options = options
        return tuple(_start(options, tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Integers have no gradient, on any rank.
        real = [g for g in gradients if g.is_floating_point() or g.is_complex()]
        options = ctx.options._replace(name=backward_name(ctx.options.name))
        reduced = iter(_reduce(options, real))
        return None, *(next(reduced) if any(g is r for r in real) else None for g in gradients)


def _reduce(options: ReductionOptions, tensors: Sequence[Tensor]) -> list[Tensor]:
    if differentiable(*tensors):
        return list(_Reduce.apply(options, *tensors))
    result: list[Tensor] = _start(options, tensors).wait()
    return result


def _start(options: ReductionOptions, tensors: Sequence[Tensor]) -> Handle:
    """Start an out-of-place grouped all-reduce; its result is the list of new tensors."""
    compression = options.compression
    require_compressor(compression)
    sent: list[Tensor] = []
    contexts: list[Any] = []
    for tensor in tensors:
        compressed, context = compression.compress(copied(tensor))
        sent.append(compressed)
        contexts.append(context)
    work: Any = options.group.grouped_all_reduce(
        sent,
        options.op,
        name=options.name,
        prescale=options.prescale,
        postscale=options.postscale,
        async_op=True,
    )
    return Handle(
        work,
        lambda results: [
            compression.decompress(tensor, context)
            for tensor, context in zip(results, contexts, strict=True)
        ],
    )
