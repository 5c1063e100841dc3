"""Checks of a call's arguments, before anything is sent, and the description that ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack

from collectives import validation
from collectives.consistency.description import Description, describe_tensor
from collectives.execution.all_reduce import Runner, Specs
from collectives.reducers import Reducer
from collectives.schedules.spec import format_all_reduce_spec, parse_all_reduce_spec

Tensor = torch.Tensor


class ReductionOptions(TypedDict, total=False):
    """What an all-reduce may be given by name, as `Group.all_reduce` documents it."""

    algorithm: str | None
    name: str | None
    prescale: float
    postscale: float


class Arguments:
    """One group's checks.

    Each method checks what the Group's method of that name is called with and describes the call.
    It raises TypeError or ValueError, naming the argument and the fix.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport

    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer,
        segments: Sequence[int] | None = None,
        **options: Unpack[ReductionOptions],
    ) -> Description:
        """Check and describe an all_reduce."""
        validation.tensor("tensor", tensor)
        if segments is not None:
            segments = validation.segments(segments, tensor.numel())
        described = {**self._reduction([tensor], op, **options), "segments": segments}
        return Description("all_reduce", options.get("name"), described, [describe_tensor(tensor)])

    def grouped_all_reduce(
        self, tensors: Sequence[Tensor], op: Reducer, **options: Unpack[ReductionOptions]
    ) -> Description:
        """Describe a grouped_all_reduce of tensors that are checked already."""
        described = self._reduction(tensors, op, **options)
        name = options.get("name")
        return Description("grouped_all_reduce", name, described, _describe_all(tensors))

    def reduce(self, tensor: Tensor, dst: int, op: Reducer, name: str | None) -> Description:
        """Check and describe a reduce."""
        validation.tensor("tensor", tensor)
        validation.rank("dst", dst, self._transport.size)
        self._onto_single_ranks([tensor], op)
        return Description("reduce", name, {"op": str(op), "dst": dst}, [describe_tensor(tensor)])

    def reduce_to_owners(
        self, tensors: Sequence[Tensor], op: Reducer, name: str | None
    ) -> Description:
        """Describe a reduce_to_owners of tensors that are checked already."""
        self._onto_single_ranks(tensors, op)
        return Description("reduce_to_owners", name, {"op": str(op)}, _describe_all(tensors))

    def broadcast_from_owners(self, tensors: Sequence[Tensor], name: str | None) -> Description:
        """Describe a broadcast_from_owners of tensors that are checked already."""
        for tensor in tensors:
            self._transport.check_device(tensor.device)
        return Description("broadcast_from_owners", name, {}, _describe_all(tensors))

    def reduce_scatter(
        self, tensor: Tensor, op: Reducer, by_rows: bool, name: str | None
    ) -> Description:
        """Check and describe a reduce_scatter."""
        validation.tensor("tensor", tensor, written=False)
        if not isinstance(by_rows, bool):
            raise TypeError(f"by_rows must be a bool, got {type(by_rows).__name__}")
        if by_rows:
            _check_rows(tensor)
        self._reduction([tensor], op)
        options = {"op": str(op), "by_rows": by_rows}
        return Description("reduce_scatter", name, options, [describe_tensor(tensor)])

    def all_gather(self, tensor: Tensor, name: str | None) -> Description:
        """Check and describe an all_gather."""
        self._rows(tensor)
        return Description("all_gather", name, {}, [describe_tensor(tensor, any_rows=True)])

    def all_to_all(
        self, tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None
    ) -> tuple[Description, Tensor]:
        """Check and describe an all_to_all; return how many rows go to each rank, too."""
        self._rows(tensor)
        counts = validation.row_splits("splits", splits, tensor.shape[0], self._transport.size)
        described = [describe_tensor(tensor, any_rows=True), describe_tensor(counts)]
        return Description("all_to_all", name, {}, described), counts

    def broadcast(self, tensor: Tensor, root: int, name: str | None) -> Description:
        """Check and describe a broadcast."""
        validation.tensor("tensor", tensor)
        validation.rank("root", root, self._transport.size)
        self._transport.check_device(tensor.device)
        return Description("broadcast", name, {"root": root}, [describe_tensor(tensor)])

    def _rows(self, tensor: Tensor) -> None:
        validation.tensor("tensor", tensor, written=False)
        _check_rows(tensor)
        self._transport.check_device(tensor.device)

    def _onto_single_ranks(self, tensors: Sequence[Tensor], op: Reducer) -> None:
        self._reduction(tensors, op)
        if op.needs_one_tree:
            raise ValueError(f"op {op} needs all ranks: use all_reduce")

    def _reduction(
        self,
        tensors: Sequence[Tensor],
        op: Reducer,
        algorithm: str | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> dict[str, Any]:
        """Check what all reductions share; return the options that ranks must agree on."""
        validation.reducer("op", op)
        specs = _parse("auto" if algorithm is None else algorithm)
        validation.scale("prescale", prescale)
        validation.scale("postscale", postscale)
        for tensor in tensors:
            op.check(tensor.dtype)
            self._transport.check_device(tensor.device)
            if (prescale != 1.0 or postscale != 1.0) and not (
                tensor.dtype.is_floating_point or tensor.dtype.is_complex
            ):
                raise TypeError(f"prescale and postscale need a floating dtype, got {tensor.dtype}")
        self._runner.check(specs, op, tensors)
        return {
            "op": str(op),
            "algorithm": format_all_reduce_spec(specs),
            "prescale": float(prescale),
            "postscale": float(postscale),
        }


def _parse(algorithm: str) -> Specs:
    try:
        return parse_all_reduce_spec(algorithm)
    except (TypeError, ValueError) as error:
        raise type(error)(f"algorithm: {error}") from None


def _describe_all(tensors: Sequence[Tensor]) -> list[Any]:
    return [describe_tensor(tensor) for tensor in tensors]


def _check_rows(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError("tensor must have a first dimension: use reshape(1)")
