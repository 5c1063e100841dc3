"""Sums and averages of sparse tensors: indices and values are gathered, equal indices added."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adasum.horovod.process_sets import ProcessSet, members_of
from collectives import Average, Group, Reducer, Sum, Work

__all__ = ["SparseHandle", "sparse_all_reduce_async", "sparse_allreduce_async"]


class SparseHandle:
    """A reduction of a sparse tensor under way; calling it waits, as Horovod's users do."""

    def __init__(
        self, group: Group, tensor: Tensor, op: Reducer, works: tuple[Work | Any, Work | Any]
    ) -> None:
        self._group = group
        self._tensor = tensor
        self._op = op
        self._works = works

    def wait(self) -> Tensor:
        """The answer, coalesced, with the same bits on every rank; raises what went wrong."""
        indices, values = (work.wait() for work in self._works)
        return _add_up(self._group.size, self._op, self._tensor, indices, values)

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for another rank."""
        return all(work.is_completed() for work in self._works)

    __call__ = wait


def sparse_all_reduce_async(
    group: Group, tensor: Tensor, op: Reducer = Average, name: str | None = None
) -> SparseHandle:
    """Starts reducing a sparse COO tensor over a group; wait() returns a new, coalesced one.

    tensor: of one shape, sparse_dim and dtype on all ranks, with any number of entries, and dense
    dimensions or none; not changed. op: Sum, or Average, which divides by the number of ranks,
    also those without an entry. float16 and bfloat16 are added up in float32, in the order of the
    ranks, so the same call gives the same bits. Each rank receives all ranks' entries: where they
    are not few, dense tensors travel cheaper.

    Collective. Raises TypeError for what is no sparse COO tensor, NotImplementedError for Adasum,
    which is not defined here on sparse tensors: pass tensor.to_dense() to another function.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"tensor must be a sparse COO tensor, not {what}")
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"op={op} of sparse tensors is not supported: use Sum or Average, or tensor.to_dense()"
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    op.check(tensor.dtype)
    tensor = tensor.detach().coalesce()
    indices = tensor.indices().t()
    # The rank beside each index tells afterwards which entries came from whom.
    source = (
        torch.full_like(indices[:, :1], group.rank) if len(indices) else indices.new_empty(0, 1)
    )
    # A name is part of what ranks agree on, and so is the shape by being in it.
    label = f"{name or 'sparse'} {tuple(tensor.shape)}"
    works = (
        group.all_gather(
            torch.cat([source, indices], 1).contiguous(), name=f"{label}: indices", async_op=True
        ),
        group.all_gather(tensor.values().contiguous(), name=f"{label}: values", async_op=True),
    )
    return SparseHandle(group, tensor, op, works)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Reducer, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Horovod's name for `sparse_all_reduce_async`; the answer comes from calling the handle."""
    return sparse_all_reduce_async(members_of(process_set), tensor, op, name)


def _add_up(size: int, op: Reducer, like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """The sum over the sources, in their order.

    indices: int64 [entries, 1 + sparse_dim], a rank and where its entry lies. values: [entries,
    ...]. No rank has an index twice, so no addition below meets another one: no order but the
    ranks' plays a part, on GPUs neither.
    """
    shape = like.shape[: like.sparse_dim()]
    places = indices.new_zeros(len(indices))
    for dimension, length in enumerate(shape):
        places = places * length + indices[:, 1 + dimension]
    found, target = torch.unique(places, return_inverse=True)
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    total = torch.zeros(len(found), *values.shape[1:], dtype=wide, device=values.device)
    counts = torch.bincount(indices[:, 0], minlength=size).tolist()
    for part, where in zip(values.split(counts), target.split(counts), strict=True):
        total[where] += part
    op.finish(total, size)
    columns = []
    for dimension in range(len(shape)):
        columns.append(found // math.prod(shape[dimension + 1 :]) % max(shape[dimension], 1))
    where = torch.stack(columns) if columns else found.new_empty(0, len(found))
    return torch.sparse_coo_tensor(
        where,
        total.to(like.dtype),
        like.shape,
        device=total.device,
        is_coalesced=True,
        check_invariants=False,
    )
