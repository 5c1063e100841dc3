"""Sums and averages of sparse tensors: ranks gather each other's entries and add equal indices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from adasum.handle import Handle
from collectives import Average, Group, Reducer, Sum


class SparseHandle(Handle[Tensor]):
    """A started reduction of a sparse tensor; calling it waits, as with Horovod's handle."""

    __call__ = Handle.wait


def sparse_all_reduce_async(
    group: Group, tensor: Tensor, op: Reducer = Average, name: str | None = None
) -> SparseHandle:
    """Start the sum or average of a sparse COO tensor; collective over the group.

    The tensor may have any number of entries; shape, sparse dimensions and dtype must be equal on
    all ranks. The handle's result is a new, coalesced tensor with the same bits on every rank,
    summed in rank order; float16 and bfloat16 are summed in float32. Each rank receives the entries
    of all ranks, so a dense tensor is cheaper unless they are few. Averages divide by the number of
    all ranks, with or without entries. Raises TypeError or NotImplementedError for other tensors
    and operators.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"tensor must be a sparse COO tensor, got {what}")
    if op not in (Sum, Average):
        asked, fix = f"op={op}", "use Sum or Average"
        if isinstance(op, Reducer) and op.ordered:
            asked, fix = "order='tree'", "leave it out"
        raise NotImplementedError(
            f"{asked} of sparse tensors is not supported: {fix}, or tensor.to_dense()"
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {type(name).__name__}")
    op.check(tensor.dtype)
    tensor = tensor.detach().coalesce()
    indices = tensor.indices().t()
    # The first column is the rank, to split the gathered entries by rank afterwards.
    rank = indices.new_full((len(indices), 1), group.rank)
    # Ranks compare names, so that the shape in the name is compared, too.
    name = f"{name or 'sparse'} {tuple(tensor.shape)}"
    parts = {"indices": torch.cat([rank, indices], 1), "values": tensor.values()}
    works = [
        group.all_gather(part.contiguous(), name=f"{name}: {what}", async_op=True)
        for what, part in parts.items()
    ]
    return SparseHandle(works, partial(_add_entries, group.size, op, tensor))


def _add_entries(size: int, op: Reducer, like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Add up the entries of all ranks, in rank order.

    indices: int64 [entries, 1 + sparse_dim], the rank and the index of each entry; values:
    [entries, ...]. Indices within one rank are distinct, so the order is fixed on GPUs, too.
    """
    shape = like.shape[: like.sparse_dim()]
    linear = indices.new_zeros(len(indices))
    for dimension, length in enumerate(shape):
        linear = linear * length + indices[:, 1 + dimension]
    found, target = torch.unique(linear, return_inverse=True)
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    total = torch.zeros(len(found), *values.shape[1:], dtype=dtype, device=values.device)
    counts = torch.bincount(indices[:, 0], minlength=size).tolist()
    for part, rows in zip(values.split(counts), target.split(counts), strict=True):
        total[rows] += part
    op.finish(total, size)
    columns = torch.unravel_index(found, shape)
    return torch.sparse_coo_tensor(
        torch.stack(columns) if columns else found.new_empty(0, len(found)),
        total.to(like.dtype),
        like.shape,
        device=total.device,
        is_coalesced=True,
        check_invariants=False,
    )
