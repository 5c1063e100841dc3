"""The arguments that allreduce and reducescatter share, beside their tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import copied
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Average, Group, Reducer, Sum, validation
from collectives.tree_order import in_order


class ReductionOptions(NamedTuple):
    """The arguments of a reduction beside its tensors, by the meaning they have in `allreduce`."""

    group: Group
    op: Reducer
    name: str | None
    compression: type[Compressor]
    prescale: float
    postscale: float

    def compress(
        self, tensors: Sequence[Tensor], argument: str = "tensor"
    ) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return copies of the tensors to send, and what decompresses the results.

        argument: what errors call the tensors, "tensors" where they are a list.
        """
        numbered = argument == "tensors"
        names = [f"{argument}[{i}]" if numbered else argument for i in range(len(tensors))]
        compressed = [
            self.compression.compress(copied(*each)) for each in zip(tensors, names, strict=True)
        ]
        contexts = [context for _, context in compressed]

        def decompress(results: Sequence[Tensor]) -> list[Tensor]:
            return list(map(self.compression.decompress, results, contexts))

        return [sent for sent, _ in compressed], decompress


def require_reducer(op: object) -> None:
    """Raise TypeError for what is not a reducer, such as Horovod's numbers or a name."""
    if not isinstance(op, Reducer):
        raise TypeError(f"op must be Sum, Average, Adasum, Min, Max or Product, not {op!r}")


def options_of(
    name: str | None,
    op: Reducer | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
    average: bool | None = None,
    compression: type[Compressor] = Compression.none,
    order: str | None = None,
    accumulate: torch.dtype | None = None,
) -> ReductionOptions:
    """Check what one of Horovod's functions was called with; `op` is Average unless given.

    TypeError: an argument has the wrong type. ValueError: both `op` and `average` are given, a
    factor is not finite, or this rank is not in the process set.
    """
    require_compressor(compression)
    if average is not None:
        if not isinstance(average, bool | int):
            raise TypeError(f"average must be a bool, not {type(average).__name__}")
        if op is not None:
            raise ValueError("the op parameter supersedes average: give only op")
        warnings.warn(
            "parameter average is deprecated: use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        op = Average if average else Sum
    op = Average if op is None else op
    require_reducer(op)
    op = in_order(op, order, accumulate)
    prescale = validation.scale("prescale_factor", prescale)
    postscale = validation.scale("postscale_factor", postscale)
    group = require_group(process_set)
    return ReductionOptions(group, op, name, compression, prescale, postscale)
