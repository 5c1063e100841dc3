"""The average of an optimizer's state over the ranks."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import torch

from collectives import Group, Sum

# A parameter's number and a key of its state.
_Entry: TypeAlias = tuple[int, str]


def average_state(optimizer: torch.optim.Optimizer, group: Group) -> None:
    """Average every floating-point tensor of the state over the ranks that have it, in place.

    Ranks that lack a tensor are given the average. Collective over the group. ValueError: on every
    rank, where a tensor's shape, dtype or kind of device differs.
    """
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    mine = {
        (i, key): value
        for i, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_sparse
    }
    described = [
        [i, key, list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
        for (i, key), value in mine.items()
    ]
    gathered = group.all_gather_bytes(json.dumps(described).encode(), name="average_state")
    kinds: dict[_Entry, list[Any]] = {}
    holders: dict[_Entry, int] = {}
    for rank, entries_of_rank in enumerate(gathered):
        # A rank that has joined sends nothing.
        for i, key, *kind in json.loads(entries_of_rank or b"[]"):
            first = kinds.setdefault((i, key), kind)
            if kind != first:
                raise ValueError(
                    f"average_state: {key} of parameter {i} is {kind} on rank {rank} and {first} "
                    "on a lower one"
                )
            holders[i, key] = holders.get((i, key), 0) + 1
    entries = sorted(kinds)
    for i, key in entries:
        if (i, key) not in mine:
            shape, dtype, device = kinds[i, key]
            where = "cpu" if device == "cpu" else parameters[i].device
            mine[i, key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=where)
            optimizer.state[parameters[i]][key] = mine[i, key]
    # Sums in half precision would lose the bits that the ranks have in common.
    copies = [mine[entry].clone(memory_format=torch.contiguous_format) for entry in entries]
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in copies]
    group.grouped_all_reduce(wide, Sum, name="average_state")
    for entry, total in zip(entries, wide, strict=True):
        mine[entry].copy_(total.div_(holders[entry]))
