"""The arguments that allreduce and reducescatter share, beside their tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import copied
from adasum.horovod.process_sets import ProcessSet, require_group
from collectives import Average, Group, Reducer, Sum


class ReductionOptions(NamedTuple):
    """The arguments of a reduction beside its tensors.

    Attributes:
        group: The ranks.
        op: Sum, Average or Adasum.
        name: Names the collective in errors.
        compression: Casts what is sent.
        prescale: Multiplies what is sent.
        postscale: Multiplies the result.
    """

    group: Group
    op: Reducer
    name: str | None
    compression: type[Compressor]
    prescale: float
    postscale: float

    def compress(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """Return copies of the tensors to send, and what decompresses the results."""
        compressed = [self.compression.compress(copied(tensor)) for tensor in tensors]
        contexts = [context for _, context in compressed]

        def decompress(results: Sequence[Tensor]) -> list[Tensor]:
            return list(map(self.compression.decompress, results, contexts))

        return [sent for sent, _ in compressed], decompress


def options_of(
    name: str | None,
    op: Reducer | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
    average: bool | None = None,
    compression: type[Compressor] = Compression.none,
) -> ReductionOptions:
    """Check what one of Horovod's functions was called with.

    Args:
        name: Of the collective.
        op: Average unless given.
        prescale: Checked by the collective, as `postscale`.
        postscale: See there.
        process_set: The ranks; all unless given.
        average: Deprecated by Horovod in favour of `op`: True is Average, False is Sum.
        compression: Casts what is sent.

    Raises:
        TypeError: `op`, `average`, `compression` or `process_set` has the wrong type.
        ValueError: Both `op` and `average` are given, or this rank is not in the process set.
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
    if not isinstance(op, Reducer):
        raise TypeError(f"op must be Sum, Average or Adasum, not {op!r}")
    group = require_group(process_set)
    return ReductionOptions(group, op, name, compression, prescale, postscale)
