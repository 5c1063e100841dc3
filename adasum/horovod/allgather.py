"""Horovod's allgather functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from adasum.handle import Handle, wait_for_all
from adasum.horovod.arguments import contiguous, copied, for_each
from adasum.horovod.autograd import backward_name, with_gradient
from adasum.horovod.names import start_named
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

    Examples:
        >>> hvd.init()
        >>> hvd.allgather(torch.ones(1, 2))  # of one rank
        tensor([[1., 1.]])
    """
    return allgather_async(tensor, name, process_set).wait()


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Start an `allgather`; `synchronize` returns its result.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.allgather_async(torch.ones(1, 2)))
        tensor([[1., 1.]])
    """
    group = require_group(process_set)
    handle = _start(group, name, tensor)
    mine = tensor.shape[0]

    def backward(gradient: Tensor) -> list[Tensor]:
        rows = _start(group, None, torch.tensor([mine], device="cpu")).wait().tolist()
        whole = copied(gradient)
        group.all_reduce(whole, Average, name=backward_name(name))
        return [whole.narrow(0, sum(rows[: group.rank]), mine)]

    return with_gradient(handle, lambda _: backward, tensor)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """`allgather` each tensor of a list.

    Examples:
        >>> hvd.init()
        >>> hvd.grouped_allgather([torch.ones(1), torch.zeros(2)])
        [tensor([1.]), tensor([0., 0.])]
    """
    return for_each(allgather, tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[Tensor]]:
    """Start an `allgather_async` of each tensor; `synchronize` returns the list of results.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1)]))
        [tensor([1.])]
    """
    return wait_for_all(for_each(allgather_async, tensors, name, process_set))


def _start(group: Group, name: str | None, tensor: Tensor) -> Handle[Tensor]:
    start = partial(group.all_gather, contiguous(tensor), name=name, async_op=True)
    return Handle([start_named("allgather", name, group, start)], lambda result: result)
