"""Horovod's functions that reduce: allreduce and reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.handle import Handle
from adasum.horovod.arguments import (
    dense,
    start_each,
    start_named,
    tensor_list,
    waiting_for,
    with_arguments_of,
    with_tensors_for,
)
from adasum.horovod.autograd import backward_name, refuse_gradient, refuse_recorded, with_gradient
from adasum.horovod.process_sets import ProcessSet, require_group
from adasum.horovod.reduction_options import ReductionOptions, options_of, require_reducer
from adasum.real_pairs import as_reals
from adasum.reducer import AdasumReducer
from adasum.sparse import SparseHandle, sparse_all_reduce_async
from collectives import Average, validation
from collectives.reducers import AnyReducer, SumReducer


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: AnyReducer | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Return a new tensor: the reduction of the tensors of all ranks.

    Gradients flow, on all ranks or none: the gradient of the result is reduced in the same way. For
    Adasum, as in Horovod, that is not the derivative: the coefficients depend on the tensors.

    Args:
        tensor: Equal in shape and dtype on all ranks; not changed. Adasum reduces a complex tensor
            as real pairs, `torch.view_as_real(tensor)`.
        average: Horovod's deprecated way to ask for Average (True) or Sum (False).
        name: Names the collective in errors; equal on all ranks. All of these functions raise
            ValueError while an earlier call of the same function and name is under way.
        compression: Casts the tensors that are sent.
        op: Sum, Average (the default), Min, Max, Product, or Adasum, with the whole tensor as one
            segment. Averages of integers lose fractions, and sums overflow: convert uint8 first.
        prescale_factor: Multiplies the tensor before the reduction; equal on all ranks. Integers
            are multiplied in float64 and lose their fraction.
        postscale_factor: Multiplies the result in the same way.
        process_set: The ranks that take part; all ranks unless given.
        order: "tree", with Sum and Average: specified bits (`collectives.Group.all_reduce`).
        accumulate: With an order: torch.float32 to add in float32 and round once, at the end.

    Raises:
        TypeError: An argument has the wrong type, or `op` does not support the tensor's dtype.
        ValueError: An argument has a bad value, or this rank is not in the process set.
        NotImplementedError: A gradient is needed through another op than Sum, Average and Adasum.

    Examples:
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # of one rank
        tensor([1., 2.])
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> hvd.allreduce_(gradient, op=hvd.Average) is gradient
        True
        >>> hvd.grouped_allreduce([torch.ones(1), torch.zeros(2)], op=hvd.Sum)
        [tensor([1.]), tensor([0., 0.])]
    """
    rest: Any = (process_set, order, accumulate, average, compression)
    options = options_of(name, op, prescale_factor, postscale_factor, *rest)
    return _reduce("allreduce", [tensor], options).wait()[0]


@with_arguments_of(allreduce, without="compression")
def allreduce_async(tensor: Tensor, **given: Any) -> Handle[Tensor]:
    """Start an `allreduce`; `synchronize` returns its result."""
    return Handle([_reduce("allreduce", [tensor], options_of(**given))], lambda found: found[0])


@with_arguments_of(allreduce_async)
def allreduce_async_(tensor: Tensor, **given: Any) -> Handle[Tensor]:
    """Start an `allreduce` in place on a contiguous tensor; do not use it until `synchronize`.

    Raises NotImplementedError if the tensor is the result of an operation that autograd recorded.
    """
    return Handle([_reduce_in_place("allreduce", [tensor], given)], lambda _: tensor)


@with_tensors_for(allreduce)
def grouped_allreduce(tensors: Sequence[Tensor], **given: Any) -> list[Tensor]:
    """`allreduce` each tensor of a list, packed into few messages.

    With Adasum each tensor is one segment.
    """
    return _reduce("grouped_allreduce", tensor_list(tensors), options_of(**given)).wait()


@with_tensors_for(allreduce_async)
def grouped_allreduce_async(tensors: Sequence[Tensor], **given: Any) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce`; `synchronize` returns the list of results."""
    return _reduce("grouped_allreduce", tensor_list(tensors), options_of(**given))


@with_tensors_for(allreduce_async)
def grouped_allreduce_async_(tensors: Sequence[Tensor], **given: Any) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce` in place; see `allreduce_async_`."""
    return _reduce_in_place("grouped_allreduce", tensor_list(tensors), given)


allreduce_ = waiting_for(allreduce_async_)
grouped_allreduce_ = waiting_for(grouped_allreduce_async_)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: AnyReducer = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    order: Literal["tree"] | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Reduce the tensors of all ranks and return this rank's rows of the result.

    Rows are divided evenly; a remainder goes to the lower ranks, one row each. Gradients flow
    through Sum and Average, scaled as in Horovod: the results' gradients are gathered, and for Sum
    multiplied by `size`, which is `size` times the derivative.

    Arguments and checks are the same as for `allreduce`. With `order="tree"` the bits are, too.

    Raises:
        NotImplementedError: A gradient is needed through another op than Sum and Average.

    Examples:
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(2, 1), op=hvd.Sum)
        tensor([[1.],
                [1.]])
        >>> hvd.synchronize(hvd.reducescatter_async(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
        >>> hvd.grouped_reducescatter([torch.ones(2), torch.zeros(1)], op=hvd.Sum)
        [tensor([1., 1.]), tensor([0.])]
    """
    rest: Any = (process_set, order, accumulate, None, compression)
    return _scatter(tensor, name, op, prescale_factor, postscale_factor, *rest).wait()


@with_arguments_of(reducescatter, without="compression")
def reducescatter_async(**given: Any) -> Handle[Tensor]:
    """Start a `reducescatter`; `synchronize` returns its result."""
    return _scatter(**given)


@with_tensors_for(reducescatter)
def grouped_reducescatter(**given: Any) -> list[Tensor]:
    """`reducescatter` each tensor of a list."""
    return _scatter_each(**given).wait()


@with_tensors_for(reducescatter_async)
def grouped_reducescatter_async(**given: Any) -> Handle[list[Tensor]]:
    """Start a `reducescatter` of each tensor; `synchronize` returns the list of results."""
    return _scatter_each(**given)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: AnyReducer, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Start the sum or average of a sparse COO tensor; calling the handle waits for the result.

    Args:
        tensor: Equal in shape, sparse dimensions and dtype on all ranks; not changed.
        name: Names the collectives in errors; equal on all ranks.
        op: Sum or Average.
        process_set: The ranks that take part; all ranks unless given.

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
    reducer = require_reducer(op)
    validation.no_mode("tensor")
    if isinstance(tensor, Tensor):
        validation.plain("tensor", tensor)
    group = require_group(process_set)

    def call(name: str, async_op: bool) -> SparseHandle:
        return sparse_all_reduce_async(group, tensor, reducer, name)

    return SparseHandle([start_named("sparse_allreduce", group, name, call)], lambda found: found)


def _reduce(
    kind: str, tensors: Sequence[Tensor], options: ReductionOptions
) -> Handle[list[Tensor]]:
    """Start reducing copies; autograd reduces the gradients in the same way."""
    if not isinstance(options.op, SumReducer | AdasumReducer):
        refuse_gradient(f"allreduce with op={options.op}", *tensors)
    sent, decompress = options.compress(tensors, _names(kind, tensors))
    handle = Handle([_start(kind, sent, options)], decompress)

    def backward(*gradients: Tensor) -> list[Tensor | None]:
        # Integers have no gradient, on any rank.
        real = [gradient.is_floating_point() or gradient.is_complex() for gradient in gradients]
        named = options._replace(name=backward_name(options.name))
        reduced = iter(_reduce(kind, list(compress(gradients, real)), named).wait())
        return [next(reduced) if has_gradient else None for has_gradient in real]

    return with_gradient(handle, lambda _: backward, *tensors)


def _reduce_in_place(
    kind: str, tensors: Sequence[Tensor], given: dict[str, Any]
) -> Handle[list[Tensor]]:
    refuse_recorded(f"{kind}_", *tensors)
    options = options_of(**given)
    # Detached: autograd must not record that a parameter's value is replaced.
    detached = [dense(*each).detach() for each in zip(tensors, _names(kind, tensors), strict=True)]
    return Handle([_start(kind, detached, options)], lambda _: list(tensors))


def _names(kind: str, tensors: Sequence[Tensor]) -> list[str]:
    """Return the tensors' names in error texts."""
    return ["tensor"] if kind == "allreduce" else [f"tensors[{i}]" for i in range(len(tensors))]


def _start(kind: str, tensors: list[Tensor], options: ReductionOptions) -> Handle[list[Tensor]]:
    """Start an all-reduce; the result is the list of tensors. `kind` is for error texts."""
    group, op = options.group, options.op
    # Adasum needs reals, for packing and for pieces between ranks.
    sent = [as_reals(each) for each in tensors] if isinstance(op, AdasumReducer) else tensors
    call: Any = partial(group.grouped_all_reduce, sent, op, **options.scales)
    if kind == "allreduce":
        call = partial(group.all_reduce, sent[0], op, **options.scales)
    return Handle([start_named(kind, group, options.name, call)], lambda _: tensors)


def _scatter_each(tensors: Sequence[Tensor], op: AnyReducer, **given: Any) -> Handle[list[Tensor]]:
    op = require_reducer(op)
    given_tensors = tensor_list(tensors)
    for tensor in given_tensors:
        # All of them are checked before the first one is sent.
        op.check(dense(tensor).dtype)
    return start_each(_scatter, given_tensors, op=op, **given)


def _scatter(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle[Tensor]:
    options = options_of(*args, **kwargs)
    group, name = options.group, options.name
    if not isinstance(options.op, SumReducer):
        refuse_gradient(f"reducescatter with op={options.op}", tensor)
    (sent,), decompress = options.compress([tensor], ["tensor"])
    call: Any = partial(group.reduce_scatter, sent, options.op, by_rows=True, **options.scales)
    work = start_named("reducescatter", group, name, call)

    def backward(gradient: Tensor) -> list[Tensor]:
        whole: Any = group.all_gather(gradient.contiguous(), name=backward_name(name))
        factor = 1 if options.op.averages else group.size
        return [whole * (options.scales["prescale"] * options.scales["postscale"] * factor)]

    handle = Handle([work], lambda result: decompress([result])[0])
    return with_gradient(handle, lambda _: backward, tensor)
