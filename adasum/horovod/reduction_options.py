"""The arguments that allreduce and reducescatter share, besides their tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import copied
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Average, Group, Reducer, Sum, validation
from collectives.reducers import AnyReducer, from_torch
from collectives.tree_order import in_order


class ReductionOptions(NamedTuple):
    """The checked arguments of a reduction, except its tensors; see `allreduce`."""

    group: Group
    op: Reducer
    name: str | None
    compression: type[Compressor]
    scales: dict[str, Any]

    def compress(
        self, tensors: Sequence[Tensor], names: Sequence[str]
    ) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return copies of the tensors to send, and a function that decompresses the results.

        names: the tensors' names in error texts.
        """
        pairs = list(map(self.compression.compress, map(copied, tensors, names)))
        contexts = [context for _, context in pairs]
        decompress = self.compression.decompress
        return [sent for sent, _ in pairs], lambda got: list(map(decompress, got, contexts))


def require_reducer(op: object) -> Reducer:
    """Return a Reducer for one of ours or torch's; raise TypeError for Horovod's numbers."""
    op = from_torch("op", op)
    if not isinstance(op, Reducer):
        raise TypeError(f"op must be Sum, Average, Adasum, Min, Max or Product, got {op!r}")
    return op


def options_of(
    name: str | None,
    op: AnyReducer | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet | None,
    order: str | None,
    accumulate: torch.dtype | None,
    average: bool | None = None,
    compression: type[Compressor] = Compression.none,
) -> ReductionOptions:
    """Check the arguments of one of Horovod's functions; `op` is Average by default.

    Raises TypeError if an argument has the wrong type, and ValueError if both `op` and `average`
    are given, a factor is not finite, or this rank is not in the process set.
    """
    require_compressor(compression)
    if average is not None:
        if not isinstance(average, bool | int):
            raise TypeError(f"average must be a bool, got {type(average).__name__}")
        if op is not None:
            raise ValueError("the op parameter supersedes average: give only op")
        text = "parameter average is deprecated: use op=Average or op=Sum"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    op = in_order(Average if op is None else require_reducer(op), order, accumulate)
    scales = {
        "prescale": validation.scale("prescale_factor", prescale_factor),
        "postscale": validation.scale("postscale_factor", postscale_factor),
    }
    return ReductionOptions(require_group(process_set), op, name, compression, scales)
