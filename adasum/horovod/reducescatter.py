"""Horovod's reducescatter functions."""

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
    differentiable,
    numbered,
    operation,
    refuse_gradient,
    tensor_list,
)
from adasum.horovod.handle import Handle, wait_for_all
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Average, Reducer, Sum, validation


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the tensors of all ranks and return this rank's rows of the result.

    Rows are divided evenly; where they do not divide, the lower ranks have one more. Gradients flow
    through Sum and Average, scaled as Horovod does it: the gathered gradients of the results for
    Average, and `size` times those for Sum, which is `size` times the derivative of the sum of the
    ranks' losses.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed.
        name: Names the collective in errors; equal on all ranks.
        compression: Casts what is sent.
        op: Sum, Average or Adasum.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        NotImplementedError: A gradient is needed through an op other than Sum and Average.
    """
    op = operation(op)
    options = ReductionOptions(
        require_group(process_set), op, name, compression, prescale_factor, postscale_factor
    )
    if not differentiable(tensor):
        reduced: Tensor = _start(options, tensor).wait()
        return reduced
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"gradients through reducescatter with op={op} are not supported: pass tensor.detach()"
        )
    result: Tensor = _Reducescatter.apply(options, tensor)
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter` without gradients; `synchronize` returns its result."""
    refuse_gradient("reducescatter", tensor)
    group, op = require_group(process_set), operation(op)
    return _start(
        ReductionOptions(group, op, name, Compression.none, prescale_factor, postscale_factor),
        tensor,
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` each tensor of a list."""
    rest = (compression, op, process_set, prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, numbered(name, i), *rest)
        for i, tensor in enumerate(tensor_list(tensors))
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter_async` of each tensor; `synchronize` returns the list of results."""
    rest = (op, process_set, prescale_factor, postscale_factor)
    return wait_for_all(
        [
            reducescatter_async(tensor, numbered(name, i), *rest)
            for i, tensor in enumerate(tensor_list(tensors))
        ]
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: ReductionOptions, tensor: Tensor) -> Any:
        ctx.options = options
        return _start(options, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, op, name, _, prescale, postscale = ctx.options
        whole = group.all_gather(gradients[0].contiguous(), name=backward_name(name))
        return None, whole * (prescale * postscale * (group.size if op is Sum else 1))


def _start(options: ReductionOptions, tensor: Tensor) -> Handle:
    group, op, name, compression, prescale, postscale = options
    require_compressor(compression)
    validation.scale("prescale_factor", prescale)
    validation.scale("postscale_factor", postscale)
    sent, context = compression.compress(copied(tensor))
    if prescale != 1.0:
        sent = sent * prescale
    work: Any = group.reduce_scatter(sent, op, by_rows=True, name=name, async_op=True)

    def finish(result: Tensor) -> Tensor:
        return compression.decompress(result if postscale == 1.0 else result * postscale, context)

    return Handle(work, finish)
