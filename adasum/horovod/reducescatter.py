"""Horovod's reducescatter functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.handle import Handle, wait_for_all
from adasum.horovod.arguments import dense, for_each, tensor_list
from adasum.horovod.autograd import backward_name, refuse_gradient, with_gradient
from adasum.horovod.names import start_named
from adasum.horovod.process_sets import ProcessSet
from adasum.horovod.reduction_options import ReductionOptions, options_of, require_reducer
from collectives import Average, Reducer
from collectives.reducers import SumReducer


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
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
        op: As for `allreduce`; average and factors of integers, too.
        process_set: The ranks that take part; all ranks unless given.
        prescale_factor: Multiplies the tensor before the reduction; equal on all ranks.
        postscale_factor: Multiplies the result; equal on all ranks.
        order: As for `allreduce`; the rows have the bits that it gives them.
        accumulate: As for `allreduce`.

    Raises:
        TypeError: An argument has the wrong type, or `op` does not take the tensor's dtype.
        ValueError: An argument has a bad value, or this rank is not in the process set.
        NotImplementedError: A gradient is needed through an op other than Sum and Average.

    Examples:
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(2, 1), op=hvd.Sum)
        tensor([[1.],
                [1.]])
    """
    rest: Any = (process_set, None, compression, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce(options, tensor).wait()


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[Tensor]:
    """Start a `reducescatter`; `synchronize` returns its result.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.reducescatter_async(torch.ones(2, 1), op=hvd.Sum))
        tensor([[1.],
                [1.]])
    """
    rest: Any = (process_set, None, Compression.none, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce(options, tensor)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> list[Tensor]:
    """`reducescatter` each tensor of a list.

    Examples:
        >>> hvd.init()
        >>> hvd.grouped_reducescatter([torch.ones(2), torch.zeros(1)], op=hvd.Sum)
        [tensor([1., 1.]), tensor([0.])]
    """
    _check(tensors, op)
    rest = (compression, op, process_set, prescale_factor, postscale_factor)
    function = partial(reducescatter, order=order, accumulate=accumulate)
    return for_each(function, tensors, name, *rest)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Reducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[list[Tensor]]:
    """Start a `reducescatter_async` of each tensor; `synchronize` returns the list of results.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(2)], op=hvd.Sum))
        [tensor([1., 1.])]
    """
    _check(tensors, op)
    rest = (op, process_set, prescale_factor, postscale_factor)
    function = partial(reducescatter_async, order=order, accumulate=accumulate)
    return wait_for_all(for_each(function, tensors, name, *rest))


def _check(tensors: Sequence[Tensor], op: Reducer) -> None:
    """Check the dtypes of all tensors before the first one is sent."""
    require_reducer(op)
    for tensor in tensor_list(tensors):
        op.check(dense(tensor).dtype)


def _reduce(options: ReductionOptions, tensor: Tensor) -> Handle[Tensor]:
    if not isinstance(options.op, SumReducer):
        refuse_gradient(f"reducescatter with op={options.op}", tensor)
    (sent,), decompress = options.compress([tensor])
    scales: Any = {"prescale": options.prescale, "postscale": options.postscale}
    start = partial(options.group.reduce_scatter, sent, options.op, by_rows=True, async_op=True)
    start = partial(start, name=options.name, **scales)
    work = start_named("reducescatter", options.name, options.group, start)

    def backward(gradient: Tensor) -> list[Tensor]:
        whole: Any = options.group.all_gather(
            gradient.contiguous(), name=backward_name(options.name)
        )
        factor = 1 if options.op.averages else options.group.size
        return [whole * (options.prescale * options.postscale * factor)]

    handle = Handle([work], lambda result: decompress([result])[0])
    return with_gradient(handle, lambda _: backward, tensor)
