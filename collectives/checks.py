"""Argument checks that all collectives share: a clear error before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from .reducers import Reducer
from .spec import AllReduceSpec, parse_all_reduce_spec


def tensor(argument: str, value: torch.Tensor) -> None:
    """A dense, contiguous tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"{argument} must be dense, got layout {value.layout}: use to_dense()")
    if not value.is_contiguous():
        raise ValueError(
            f"{argument} must be contiguous, got shape {tuple(value.shape)} with strides "
            f"{value.stride()}: pass {argument}.contiguous() and copy the result back"
        )


def tensor_list(argument: str, values: object) -> list[torch.Tensor]:
    """Dense, contiguous tensors that share no memory."""
    if isinstance(values, torch.Tensor):
        raise TypeError(f"{argument} must be a sequence of tensors, got one tensor")
    if not isinstance(values, Iterable):
        raise TypeError(f"{argument} must be a sequence of tensors, got {type(values).__name__}")
    values = list(values)
    for i, value in enumerate(values):
        tensor(f"{argument}[{i}]", value)
    spans = sorted(
        (str(v.device), v.data_ptr(), v.data_ptr() + v.numel() * v.element_size(), i)
        for i, v in enumerate(values)
        if v.numel()
    )
    for (device, _, stop, i), (other_device, start, _, j) in pairwise(spans):
        if device == other_device and start < stop:
            raise ValueError(f"{argument}[{i}] and {argument}[{j}] overlap in memory: pass copies")
    return values


def segments(values: Sequence[int], numel: int) -> tuple[int, ...]:
    """Element boundaries that start at 0, do not descend and end at `numel`."""
    cuts = tuple(int(v) for v in values)
    if not cuts or cuts[0] != 0 or cuts[-1] != numel:
        raise ValueError(f"segments must start at 0 and end at the tensor's {numel} elements")
    if any(b < a for a, b in pairwise(cuts)):
        raise ValueError("segments must not descend")
    return cuts


def rank(argument: str, value: int, size: int) -> None:
    """A rank of the group."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if not 0 <= value < size:
        raise ValueError(f"{argument} must be a rank from 0 to {size - 1}, got {value}")


def distinct_ranks(argument: str, values: object, size: int) -> tuple[int, ...]:
    """One or more different ranks of the group."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"{argument} must be a sequence of ranks, got {type(values).__name__}")
    members = tuple(values)
    for i, value in enumerate(members):
        rank(f"{argument}[{i}]", value, size)
    if not members or len({*members}) < len(members):
        raise ValueError(f"{argument} must be one or more different ranks, got {list(members)}")
    return members


def row_splits(
    argument: str, values: Sequence[int] | torch.Tensor | None, rows: int, size: int
) -> torch.Tensor:
    """How many of a tensor's rows go to each rank: int64 [size] on the CPU."""
    if values is None:
        if rows % size:
            raise ValueError(
                f"{argument} must say which rows go to which of {size} ranks: "
                f"{rows} rows are not equally many for each"
            )
        return torch.full((size,), rows // size)
    counts = torch.as_tensor(values, device="cpu")
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise TypeError(f"{argument} must be ints, got {counts.dtype}")
    if counts.shape != (size,) or bool((counts < 0).any()):
        raise ValueError(f"{argument} must be {size} numbers of rows, got {counts.tolist()}")
    if int(counts.sum()) > rows:
        raise ValueError(f"{argument} are {int(counts.sum())} rows in all, tensor has {rows}")
    return counts.to(torch.int64)


def reducer(argument: str, value: Reducer) -> None:
    """Sum, Average or another instance of Reducer."""
    if not isinstance(value, Reducer):
        raise TypeError(
            f"{argument} must be a Reducer such as collectives.Sum, got {type(value).__name__}"
        )


def algorithm(argument: str, value: str | None) -> tuple[AllReduceSpec, ...]:
    """A specification string, "auto" for None; ValueError naming what is wrong with it."""
    try:
        return parse_all_reduce_spec("auto" if value is None else value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def scale(argument: str, value: float) -> None:
    """A finite factor."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be finite, got {value}")
