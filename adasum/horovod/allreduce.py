"""Horovod's allreduce functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.handle import Handle
from adasum.horovod.arguments import dense, tensor_list
from adasum.horovod.autograd import (
    backward_name,
    refuse_gradient,
    refuse_recorded,
    with_gradient,
)
from adasum.horovod.names import start_named
from adasum.horovod.process_sets import ProcessSet, require_group
from adasum.horovod.reduction_options import ReductionOptions, options_of, require_reducer
from adasum.real_pairs import as_reals
from adasum.reducer import AdasumReducer
from adasum.sparse import SparseHandle, sparse_all_reduce_async
from collectives import Reducer, validation
from collectives.reducers import SumReducer


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Return a new tensor: the reduction of the tensors of all ranks.

    Gradients flow, on all ranks or on none: the gradient of the result is reduced in the same way.
    For Sum and Average that is the derivative. For Adasum it is not, because its coefficients
    depend on the tensors too; Horovod does the same.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed. A complex one counts for Adasum
            as its real pairs, `torch.view_as_real(tensor)`.
        average: Horovod's deprecated way to ask for Average (True) or Sum (False).
        name: Names the collective in errors; equal on all ranks, and of no other allreduce that is
            still under way: that is a ValueError, in all of these functions.
        compression: Casts what is sent.
        op: Sum, Average, Min, Max, Product, or Adasum, for which the whole tensor is one segment;
            Average unless given. An average of integers loses its fraction, and what their sum has
            beyond the dtype's range: convert uint8 and the like before.
        prescale_factor: Multiplies the tensor before the reduction; equal on all ranks. Integers
            are multiplied in float64 and lose their fraction, here and after the reduction.
        postscale_factor: Multiplies the result; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.
        order: "tree", with Sum and Average: every element is one balanced tree over the ranks, so
            that its bits depend on nothing else (`collectives.Group.all_reduce`).
        accumulate: With an order: torch.float32 to add in float32 and round once, at the end.

    Raises:
        TypeError: An argument has the wrong type, or `op` does not take the tensor's dtype.
        ValueError: An argument has a bad value, or this rank is not in the process set.
        NotImplementedError: A gradient is needed through another op than Sum, Average and Adasum.

    Examples:
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # of one rank
        tensor([1., 2.])
    """
    rest: Any = (process_set, average, compression, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce(options, [tensor]).wait()[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[Tensor]:
    """Start an `allreduce`; `synchronize` returns its result.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
    """
    rest: Any = (process_set, average, Compression.none, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return Handle([_reduce(options, [tensor])], lambda tensors: tensors[0])


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Do an `allreduce` in place on a contiguous tensor, which is returned.

    Raises:
        NotImplementedError: autograd has recorded how the tensor was made.

    Examples:
        >>> hvd.init()
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> hvd.allreduce_(gradient, op=hvd.Average) is gradient
        True
    """
    scales = prescale_factor, postscale_factor
    ordered: Any = {"order": order, "accumulate": accumulate}
    return allreduce_async_(tensor, average, name, op, *scales, process_set, **ordered).wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[Tensor]:
    """Start an `allreduce_`; the tensor must not be used until `synchronize`.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.allreduce_async_(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
    """
    refuse_recorded("allreduce_", tensor)
    rest: Any = (process_set, average, Compression.none, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    work = _start_in_place(options, [dense(tensor).detach()])
    return Handle([work], lambda _: tensor)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> list[Tensor]:
    """`allreduce` each tensor of a list, packed into few messages.

    For Adasum each tensor is a segment of its own.

    Examples:
        >>> hvd.init()
        >>> hvd.grouped_allreduce([torch.ones(1), torch.zeros(2)], op=hvd.Sum)
        [tensor([1.]), tensor([0., 0.])]
    """
    rest: Any = (process_set, average, compression, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce(options, tensor_list(tensors), "grouped_allreduce").wait()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce`; `synchronize` returns the list of results.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(1)], op=hvd.Sum))
        [tensor([1.])]
    """
    rest: Any = (process_set, average, Compression.none, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce(options, tensor_list(tensors), "grouped_allreduce")


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> list[Tensor]:
    """Do a `grouped_allreduce` in place on contiguous tensors, which are returned.

    Raises:
        NotImplementedError: autograd has recorded how one of them was made.

    Examples:
        >>> hvd.init()
        >>> hvd.grouped_allreduce_([torch.ones(1), torch.zeros(2)], op=hvd.Sum)
        [tensor([1.]), tensor([0., 0.])]
    """
    rest = op, prescale_factor, postscale_factor, process_set
    ordered: Any = {"order": order, "accumulate": accumulate}
    return grouped_allreduce_async_(tensors, average, name, *rest, **ordered).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce_`; the tensors must not be used until `synchronize`.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(1)], op=hvd.Sum))
        [tensor([1.])]
    """
    rest: Any = (process_set, average, Compression.none, order, accumulate)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    inputs = tensor_list(tensors)
    refuse_recorded("grouped_allreduce_", *inputs)
    # Detached: autograd must not record that a parameter's value is replaced.
    detached = [dense(each, f"tensors[{i}]").detach() for i, each in enumerate(inputs)]
    work = _start_in_place(options, detached, "grouped_allreduce")
    return Handle([work], lambda _: inputs)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Reducer, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Start the sum or average of a sparse tensor.

    Args:
        tensor: Sparse COO, equal in shape, sparse dimensions and dtype on all ranks; not changed.
        name: Names the collectives in errors; equal on all ranks.
        op: Sum or Average.
        process_set: The ranks that take part; all ranks unless given.

    Returns:
        A handle; calling it waits and returns a new, coalesced tensor.

    Raises:
        TypeError: `tensor` is not a sparse COO tensor.
        NotImplementedError: `op` is neither Sum nor Average, or a gradient is needed.

    Examples:
        >>> hvd.init()
        >>> handle = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "rows", hvd.Sum)
        >>> hvd.synchronize(handle).to_dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    refuse_gradient("sparse_allreduce_async", tensor)
    require_reducer(op)
    validation.no_mode("tensor")
    if isinstance(tensor, Tensor):
        validation.plain("tensor", tensor)
    group = require_group(process_set)
    start = partial(sparse_all_reduce_async, group, tensor, op, name)
    handle: SparseHandle = start_named("sparse_allreduce", name, group, start)
    return handle


def _reduce(
    options: ReductionOptions, tensors: Sequence[Tensor], kind: str = "allreduce"
) -> Handle[list[Tensor]]:
    """Start reducing copies; autograd reduces the gradients in the same way."""
    if not isinstance(options.op, SumReducer | AdasumReducer):
        refuse_gradient(f"allreduce with op={options.op}", *tensors)
    sent, decompress = options.compress(tensors, "tensor" if kind == "allreduce" else "tensors")
    handle = Handle([_start_in_place(options, sent, kind)], decompress)

    def backward(*gradients: Tensor) -> list[Tensor | None]:
        # Integers have no gradient, on any rank.
        real = [gradient.is_floating_point() or gradient.is_complex() for gradient in gradients]
        named = options._replace(name=backward_name(options.name))
        reduced = iter(_reduce(named, list(compress(gradients, real)), kind).wait())
        return [next(reduced) if has_gradient else None for has_gradient in real]

    return with_gradient(handle, lambda _: backward, *tensors)


def _start_in_place(
    options: ReductionOptions, tensors: Sequence[Tensor], kind: str = "allreduce"
) -> Any:
    """Start an all-reduce, whose result is the list of tensors; errors say how it was called."""
    group, op = options.group, options.op
    scales: Any = {"prescale": options.prescale, "postscale": options.postscale}
    given = list(tensors)
    if isinstance(op, AdasumReducer):
        # So that they are cut between ranks, and packed, as their reals are.
        tensors = [as_reals(tensor) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
    start: Any = partial(group.grouped_all_reduce, tensors, op)
    if kind == "allreduce":
        start = partial(group.all_reduce, *tensors, op)
    start = partial(start, name=options.name, async_op=True, **scales)
    return Handle([start_named(kind, options.name, group, start)], lambda _: given)
