"""All-reduces that travel with the agreement, where all ranks share a board.

Every rank shows its vector there before it enters the call; once all have entered, no message is
left to send. The bits are those of the algorithm by messages:

- `rd`, for small vectors: each rank carries out the whole tree by itself, reading n vectors; where
  a reduction costs more than waiting for another rank's, each pair's first rank does it for all.
- `rechd`, of sums: each rank reduces its n-th of all vectors, and takes the rest from the others.
- `vhdd`: in each level the pieces that its ranks would hold, in place. With fewer processors than
  ranks some ranks do the others' pieces, too, and those sleep until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from collectives.execution.executor import Workspace
from collectives.fused_buffer import buffer_of
from collectives.reducers import Operands, Piece, Reducer, kernels
from collectives.schedules import recursive_halving
from collectives.schedules.folding import Fold
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import AllReduceSpec
from collectives.transport.shared_memory.symmetric_memory import (
    TABLE_BYTES,
    WINDOW_BYTES,
    Board,
    Windows,
)

Tensor = torch.Tensor

# Up to here, and for "whole" to so much of all ranks together, a wait costs more than a reduction.
WHOLE_BYTES = 256 * 1024
_MOST_BYTES = 2 * 1024 * 1024
# A row of dot products and norms of a segment.
_ROW_BYTES = 24
_CACHE_LINE = 64


@dataclass
class Exhibit:
    """What a rank shows in a call: `fill` writes it to a tensor of `numel` elements.

    rows: segments of it. way: how it is reduced, as `way_of` says.
    """

    numel: int
    dtype: torch.dtype
    rows: int
    fill: Callable[[Tensor], object]
    way: str = "whole"

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Shown:
    """What all ranks show in a call, and how the result is made of it."""

    board: Board
    windows: Windows
    way: str

    @property
    def vectors(self) -> Sequence[Tensor]:
        return self.windows.vectors

    def reduce(
        self,
        out: Tensor,
        op: Reducer,
        segments: Sequence[int] | None,
        workspace: Workspace,
        label: str,
        timeout: float,
    ) -> Tensor:
        """The vectors reduced and finished: `out`, or one that all ranks read and none changes."""
        if self.way == "whole":
            _reduce_whole(self.vectors, out, op, segments, workspace)
            op.finish(out, len(self.vectors))
            return out
        if op.needs_one_tree:
            self._reduce_levels(op, segments, label, timeout)
        else:
            self._reduce_slice(op, label, timeout)
        return self.vectors[0]

    def _reduce_slice(self, op: Reducer, label: str, timeout: float) -> None:
        """Make the first vector the result: this rank its slice, which no other rank touches."""
        vectors, rank = self.vectors, self.board.rank
        numel = vectors[0].numel()
        line = _CACHE_LINE // vectors[0].element_size()
        cuts = split_bounds(-(-numel // line), len(vectors))
        here = cuts[rank] * line, min(cuts[rank + 1] * line, numel)
        mine = [self.windows.part(other, *here) for other in range(len(vectors))]
        for left, right in _pairs(len(vectors)):
            _reduce_two(mine[left], mine[right], mine[left], op, None)
        op.finish(mine[0], len(vectors))
        self.board.meet(f"step 1 of {label}", timeout)

    def _reduce_levels(
        self, op: Reducer, segments: Sequence[int] | None, label: str, timeout: float
    ) -> None:
        """Make the first vector the result, in each level each pair's first vector the pair's."""
        board = self.board
        workers = board.workers if self.way == "sliced" else 0
        plan = _plan_of(len(self.vectors), workers, board.rank)
        for number, (level, mine) in enumerate(plan.steps):
            where = f"step {number + 1} of {label}"
            last = number + 1 == plan.levels
            if mine:
                self._reduce_parts(level, mine, op, segments, where, timeout, finish=last)
            elif level.shared:
                board.meet(where, timeout)
            if not last:
                board.meet(where, timeout)
        where = f"step {plan.levels + 1} (the end) of {label}"
        board.meet(where, timeout, plan.left_out, last=True)

    def _reduce_parts(
        self,
        level: _Level,
        mine: Sequence[_Part],
        op: Reducer,
        segments: Sequence[int] | None,
        where: str,
        timeout: float,
        *,
        finish: bool,
    ) -> None:
        """Do this rank's parts of a level, each in a vector of its own, one behind the other."""
        vectors = self.vectors
        numel = vectors[0].numel()
        cuts = split_bounds(numel, Fold(len(vectors)).leaves)
        pieces = []
        for i, part in enumerate(mine):
            here = cuts[part.start], cuts[part.stop]
            left, right = (self.windows.part(other, *here) for other in (part.left, part.right))
            pieces.append(Piece((left, right), left, i * numel + here[0]))
        bounds = _repeated(None if segments is None else tuple(segments), numel, len(mine))
        sums = _Sums(self.board, level, mine, where, timeout) if level.block > 1 else None
        op.reduce(Operands(tuple(pieces), len(mine) * numel, bounds, sums))
        if sums is not None and sums.calls != 1:
            raise TypeError(f"{op} called sum_partials {sums.calls} times, not once")
        for piece in pieces if finish else ():
            op.finish(piece.out, len(vectors))


def exhibit_of(tensors: Sequence[Tensor], segments: Sequence[int] | None) -> Exhibit | None:
    """How to show the tensors of an all-reduce; None where they are too large.

    Several tensors are shown as they are packed: of one dtype, each in its slot.
    """
    first = tensors[0]
    if len(tensors) == 1:
        if not (first.is_cpu and 0 < first.nbytes <= WINDOW_BYTES):
            return None
        flat = flat_of(first)
        rows = 1 if segments is None else len(segments) - 1
        return Exhibit(flat.numel(), flat.dtype, rows, lambda window: window.copy_(flat))
    if not all(t.is_cpu and t.dtype == first.dtype for t in tensors):
        return None
    if not 0 < sum(tensor.nbytes for tensor in tensors) <= WINDOW_BYTES:
        return None
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


def flat_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements in one dimension, apart from autograd."""
    if type(tensor) is Tensor and tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().view(-1)


def way_of(
    spec: AllReduceSpec, show: Exhibit, size: int, op: Reducer, measured: bool
) -> str | None:
    """How a range of a specification is carried out here; None for messages.

    "whole": each rank all of it. "pairs": each pair's first rank. "sliced": in pieces.
    measured: whether `auto` may follow what costs least.
    """
    if spec.inner is not None or spec.shards != 1:
        return None
    nbytes = show.nbytes
    # An addition is cheaper than waiting, and with two ranks nobody would do anything else.
    small_way = "pairs" if op.needs_one_tree and size > 2 else "whole"
    small = nbytes <= (
        WHOLE_BYTES if small_way == "pairs" else min(WHOLE_BYTES, _MOST_BYTES // size)
    )
    fits = show.rows * _ROW_BYTES <= TABLE_BYTES or not op.needs_one_tree
    name = spec.outer
    if name == "auto":
        name = op.algorithm(nbytes, size)
        if measured and not op.needs_one_tree:
            name = "rd" if small else "rechd"
    if name == "rd" and small:
        return small_way
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
    *inner, (first, second) = _pairs(size)
    for i, (left, right) in enumerate(inner):
        target = scratch[i * width :][:numel]
        _reduce_two(places[left], places[right], target, op, segments)
        places[left] = target
    _reduce_two(places[first], places[second], out, op, segments)


class _Part(NamedTuple):
    """What a rank does in a level: the chunks that `leaf` would hold, of two ranks' vectors."""

    left: int
    right: int
    start: int
    stop: int
    leaf: int
    worker: int


class _Level(NamedTuple):
    """Pairs that are reduced at once.

    block: parts of a pair. shared: whether several ranks have a pair's.
    """

    parts: tuple[_Part, ...]
    block: int
    shared: bool


@dataclass
class _Sums:
    """Gives the table of each of a rank's parts the sums over all parts of its pair."""

    board: Board
    level: _Level
    mine: Sequence[_Part]
    where: str
    timeout: float
    calls: int = 0

    def __call__(self, tables: Tensor) -> None:
        self.calls += 1
        level, mine = self.level, self.mine
        # Numpy's operations on a few numbers cost a third of torch's.
        rows = tables.detach().view(len(mine), -1).numpy()
        first, sums = mine[0].leaf, rows
        if level.shared:
            leaves = [part.leaf for part in mine]
            sums = self.board.gather(leaves, rows, len(level.parts), self.where, self.timeout)
            first = 0
        pairs = sums.reshape(-1, level.block, rows.shape[1])
        while pairs.shape[1] > 1:
            # In the order in which recursive doubling adds them.
            pairs = pairs[:, ::2] + pairs[:, 1::2]
        for row, part in zip(rows, mine, strict=True):
            row[:] = pairs[(part.leaf - first) // level.block, 0]


class _Plan(NamedTuple):
    """A rank's part in the `levels` levels: steps with what it does, as long as it does any.

    left_out: meetings that are left then, the last one included.
    """

    levels: int
    steps: tuple[tuple[_Level, tuple[_Part, ...]], ...]
    left_out: int


@lru_cache
def _plan_of(size: int, workers: int, rank: int) -> _Plan:
    levels = _levels(size, workers)
    steps = [(level, tuple(p for p in level.parts if p.worker == rank)) for level in levels]
    while steps and not steps[-1][1]:
        steps.pop()
    left_out = sum(1 + level.shared for level in levels[len(steps) :])
    return _Plan(len(levels), tuple(steps), max(left_out, 1))


@lru_cache
def _levels(size: int, workers: int) -> tuple[_Level, ...]:
    """The tree's levels. workers: ranks that work at once, each pair cut as `vhdd` cuts it; 0 for
    a pair's first rank, which does it whole, as `rd`.
    """
    fold = Fold(size)
    leaves = fold.leaves
    levels = []
    if fold.extra:
        folded = (_Part(2 * i, 2 * i + 1, 0, leaves, i, 2 * i) for i in range(fold.extra))
        levels.append(_Level(tuple(folded), 1, shared=False))
    # So many leaves in a row are one rank's work.
    share = leaves // min(leaves, 1 << (workers.bit_length() - 1)) if workers else leaves
    for depth in range(leaves.bit_length() - 1):
        distance = 1 << depth
        parts = []
        for leaf in range(0, leaves, 1 if workers else 2 * distance):
            first = leaf - leaf % (2 * distance)
            pair = fold.rank(first), fold.rank(first + distance)
            if workers:
                start, stop = recursive_halving.levels(fold, leaf)[depth].keep
                parts.append(_Part(*pair, start, stop, leaf, fold.rank(leaf - leaf % share)))
            else:
                parts.append(_Part(*pair, 0, leaves, leaf, pair[0]))
        block = 2 * distance if workers else 1
        levels.append(_Level(tuple(parts), block, shared=block > share))
    return tuple(levels)


@lru_cache
def _pairs(size: int) -> list[tuple[int, int]]:
    """Of which ranks' vectors each one is reduced into the first, in turn."""
    return [(part.left, part.right) for level in _levels(size, 0) for part in level.parts]


@lru_cache(maxsize=256)
def _repeated(segments: tuple[int, ...] | None, numel: int, times: int) -> tuple[int, ...]:
    """The boundaries of `times` vectors of `numel` elements, one behind the other."""
    one = (0, numel) if segments is None else segments
    return (0, *(i * numel + bound for i in range(times) for bound in one[1:]))
