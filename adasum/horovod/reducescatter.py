"""Horovod's reducescatter functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.handle import Handle, wait_for_all
from adasum.horovod.arguments import for_each
from adasum.horovod.autograd import backward_name, differentiable, recorded, refuse_gradient
from adasum.horovod.process_sets import ProcessSet
from adasum.horovod.reduction_options import ReductionOptions, options_of
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
        TypeError: An argument has the wrong type, or `op` or a factor does not take the tensor's
            dtype.
        ValueError: An argument has a bad value, or this rank is not in the process set.
        NotImplementedError: A gradient is needed through an op other than Sum and Average.
    """
    options = options_of(
        name, op, prescale_factor, postscale_factor, process_set, compression=compression
    )
    if options.op not in (Sum, Average) and differentiable(tensor):
        raise NotImplementedError(
            f"gradients through reducescatter with op={op} are not supported: pass tensor.detach()"
        )

    def forward(tensor: Tensor) -> Any:
        return _start(options, tensor).wait(), backward

    def backward(gradient: Tensor) -> list[Tensor]:
        whole: Any = options.group.all_gather(gradient.contiguous(), name=backward_name(name))
        factor = options.group.size if options.op is Sum else 1
        return [whole * (prescale_factor * postscale_factor * factor)]

    return recorded(forward, tensor)


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
    return _start(options_of(name, op, prescale_factor, postscale_factor, process_set), tensor)


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
    return for_each(reducescatter, tensors, name, *rest)


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
    return wait_for_all(for_each(reducescatter_async, tensors, name, *rest))


def _start(options: ReductionOptions, tensor: Tensor) -> Handle:
    validation.scale("prescale_factor", options.prescale)
    validation.scale("postscale_factor", options.postscale)
    (sent,), decompress = options.compress([tensor])
    scaled = options.prescale != 1.0 or options.postscale != 1.0
    if scaled and not (sent.is_floating_point() or sent.is_complex()):
        raise TypeError(f"prescale_factor and postscale_factor need floats, got {sent.dtype}")
    if options.prescale != 1.0:
        sent = sent * options.prescale
    work = options.group.reduce_scatter(
        sent, options.op, by_rows=True, name=options.name, async_op=True
    )

    def finish(result: Tensor) -> Tensor:
        return decompress([result if options.postscale == 1.0 else result * options.postscale])[0]

    return Handle([work], finish)
