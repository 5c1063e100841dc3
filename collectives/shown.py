"""All-reduces that travel with the agreement, where all ranks share a board.

Every rank shows its vector there before it enters the call; once all have entered, no message is
left to send. Small vectors: each rank carries out the whole tree of recursive doubling (`rd`) by
itself, reading n vectors, or, where a reduction costs more than waiting for another rank's, each
pair's first rank does it for all. Larger ones: each reduces its n-th of all, in place, and takes
the rest of the result from the others, which is what halving and doubling come to (`rechd`,
`vhdd`). Sums have the bits that messages give them; Adasum's dot products are cut elsewhere than
`vhdd` cuts them, so that it has those of `rd` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .algorithms.folding import Fold
from .executor import Workspace
from .fused import buffer_of
from .reducers import Operands, Piece, Reducer, kernels
from .spec import AllReduceSpec
from .split import split_bounds
from .transport.board import TABLE_BYTES, WINDOW_BYTES, Board

Tensor = torch.Tensor

# Up to here, and to so much of all ranks together, reducing all oneself is cheaper than waiting.
WHOLE_BYTES = 256 * 1024
_MOST_BYTES = 2 * 1024 * 1024
# A row of dot products and norms of a segment.
_ROW_BYTES = 24
_CACHE_LINE = 64


@dataclass(frozen=True)
class Exhibit:
    """What a rank shows in a call: `fill` writes it to a tensor of `numel` elements.

    rows: segments of it. way: how it is reduced, a key of `Shown.WAYS`.
    """

    numel: int
    dtype: torch.dtype
    rows: int
    fill: Callable[[Tensor], object]
    way: str = "whole"

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Shown:
    """What all ranks show in a call, and how the result is made of it."""

    board: Board
    vectors: Sequence[Tensor]
    way: str

    def reduce(
        self,
        out: Tensor,
        op: Reducer,
        segments: Sequence[int] | None,
        workspace: Workspace,
        label: str,
        timeout: float,
    ) -> None:
        """out = the vectors reduced by `op`."""
        if self.way == "whole":
            _reduce_whole(self.vectors, out, op, segments, workspace)
            return
        if self.way == "pairs":
            self._reduce_pairs(op, segments, label, timeout)
        else:
            self._reduce_slice(op, segments, label, timeout)
        out.copy_(self.vectors[0])

    def _reduce_pairs(
        self, op: Reducer, segments: Sequence[int] | None, label: str, timeout: float
    ) -> None:
        """Make the first vector the result: each pair's first rank makes its vector the pair's."""
        vectors = self.vectors
        for number, pairs in enumerate(_levels(len(vectors))):
            for left, right in pairs:
                if left == self.board.rank:
                    _reduce_two(vectors[left], vectors[right], vectors[left], op, segments)
            self.board.meet(f"step {number + 1} of {label}", timeout)

    def _reduce_slice(
        self, op: Reducer, segments: Sequence[int] | None, label: str, timeout: float
    ) -> None:
        """Make the first vector the result: this rank its slice, which no other rank touches."""
        vectors, rank = self.vectors, self.board.rank
        numel = vectors[0].numel()
        line = _CACHE_LINE // vectors[0].element_size()
        cuts = split_bounds(-(-numel // line), len(vectors))
        here = slice(cuts[rank] * line, min(cuts[rank + 1] * line, numel))
        mine = [vector[here] for vector in vectors]
        for number, pairs in enumerate(_levels(len(vectors))):
            where = f"step {number + 1} (the dot products) of {label}"

            def add(table: Tensor, where: str = where) -> None:
                self.board.add(table, where, timeout)

            # The level's pairs as one pair of vectors, one behind the other: one table for all.
            pieces = tuple(
                Piece((mine[left], mine[right]), mine[left], i * numel + here.start)
                for i, (left, right) in enumerate(pairs)
            )
            bounds = _repeated(None if segments is None else tuple(segments), numel, len(pairs))
            op.reduce(Operands(pieces, len(pairs) * numel, bounds, add))
        self.board.meet(f"the last step of {label}", timeout)


def exhibit_of(tensors: Sequence[Tensor], segments: Sequence[int] | None) -> Exhibit | None:
    """How to show the tensors of an all-reduce; None where they are too large.

    Several tensors are shown as they are packed: of one dtype, each in its slot.
    """
    first = tensors[0]
    if not all(t.is_cpu and t.dtype == first.dtype for t in tensors):
        return None
    if not 0 < sum(tensor.nbytes for tensor in tensors) <= WINDOW_BYTES:
        return None
    if len(tensors) == 1:
        flat = first.detach().view(-1)
        rows = 1 if segments is None else len(segments) - 1
        return Exhibit(flat.numel(), flat.dtype, rows, lambda window: window.copy_(flat))
    if first.dtype not in kernels.DTYPES:
        return None
    fused = buffer_of(tensors)
    layout = kernels.layout_of(tensors) if fused is None else fused.layout
    if layout.numel * first.element_size() > WINDOW_BYTES:
        return None
    if fused is not None:
        buffer = fused.buffer
        return Exhibit(
            layout.numel, layout.dtype, len(tensors), lambda window: window.copy_(buffer)
        )
    parts = [tensor.detach() for tensor in tensors]
    return Exhibit(
        layout.numel,
        layout.dtype,
        len(tensors),
        lambda window: kernels.pack(parts, layout=layout, out=window),
    )


def way_of(
    spec: AllReduceSpec, show: Exhibit, size: int, op: Reducer, measured: bool
) -> str | None:
    """How a range of a specification is carried out here; None for messages.

    "whole": each rank all of it. "pairs": each pair's first rank. "sliced": each rank a part.
    measured: whether `auto` may follow what costs least.
    """
    if spec.inner is not None or spec.shards != 1:
        return None
    nbytes = show.nbytes
    small = nbytes <= min(WHOLE_BYTES, _MOST_BYTES // size)
    fits = show.rows * (size // 2) * _ROW_BYTES <= TABLE_BYTES or not op.uniform
    name = spec.outer
    if name == "auto":
        name = op.algorithm(nbytes, size)
        if measured and not op.uniform:
            name = "rd" if small else "rechd"
    if name == "rd" and small:
        # An addition is cheaper than waiting, and with two ranks nobody would do anything else.
        return "pairs" if op.uniform and size > 2 else "whole"
    return "sliced" if name in ("rechd", "vhdd") and fits else None


def _reduce_two(
    left: Tensor, right: Tensor, out: Tensor, op: Reducer, segments: Sequence[int] | None
) -> None:
    op.reduce(Operands((Piece((left, right), out, 0),), out.numel(), segments, None))


def _reduce_whole(
    shown: Sequence[Tensor],
    out: Tensor,
    op: Reducer,
    segments: Sequence[int] | None,
    workspace: Workspace,
) -> None:
    """out = what `rd` makes of all ranks' vectors, which are only read.

    Between them stand buffers aligned alike on every rank, so that all get the same bits.
    """
    size = len(shown)
    width = -(-out.nbytes // _CACHE_LINE) * _CACHE_LINE // out.element_size()
    numel = out.numel()
    scratch = workspace.take(width * (size - 2), out) if size > 2 else out
    places = [*shown]
    *inner, (first, second) = [pair for pairs in _levels(size) for pair in pairs]
    for i, (left, right) in enumerate(inner):
        target = scratch[i * width :][:numel]
        _reduce_two(places[left], places[right], target, op, segments)
        places[left] = target
    _reduce_two(places[first], places[second], out, op, segments)


@lru_cache
def _levels(size: int) -> list[list[tuple[int, int]]]:
    """The pairs of ranks whose vectors are reduced in each level, into the first one's."""
    fold = Fold(size)
    levels = [[(2 * leaf, 2 * leaf + 1) for leaf in range(fold.extra)]] if fold.extra else []
    distance = 1
    while distance < fold.leaves:
        leaves = range(0, fold.leaves, 2 * distance)
        levels.append([(fold.rank(leaf), fold.rank(leaf + distance)) for leaf in leaves])
        distance *= 2
    return levels


@lru_cache(maxsize=256)
def _repeated(segments: tuple[int, ...] | None, numel: int, times: int) -> tuple[int, ...]:
    """The boundaries of `times` vectors of `numel` elements, one behind the other."""
    one = (0, numel) if segments is None else segments
    return (0, *(i * numel + bound for i in range(times) for bound in one[1:]))
