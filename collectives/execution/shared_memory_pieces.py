"""All-reduces of more than a rank's buffer holds, through the buffers in pieces.

For operators that reduce element by element. A buffer has three slots, of a piece each, so that one
wait a piece is enough: while the ranks reduce their shares of one piece, they fill the next one's
slot, and after the wait copy the result from the first rank's slot. Whoever fills a slot again has
waited since the last copy from it. The bits are those of the same algorithm by messages, since no
element's depend on where a vector is cut.

Adasum needs the Gram matrices of whole slices first: see `shared_memory_slices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.shared_memory_levels import pairs
from collectives.execution.vectors import Vector
from collectives.reducers import Operands, Piece, Reducer, as_real
from collectives.schedules.partition import piece_bounds
from collectives.transport.shared_memory.symmetric_memory import BUFFER_BYTES, SymmetricMemory

Tensor = torch.Tensor
SLOTS = 3
_CACHE_LINE = 64


@dataclass(eq=False)
class SharedMemoryPieces:
    """One all-reduce of one rank's tensors: `fill`, then once all ranks have signalled, `reduce`.

    The operator works element by element; `at_once` it is handed all ranks' operands at once, as by
    `direct`, else pairs, in the order of `rechd`.
    """

    vector: Vector
    op: Reducer
    at_once: bool
    postscale: float
    runner: Runner
    memory: SymmetricMemory
    method: str = field(default="in pieces", init=False)
    by_tree: bool = field(default=False, init=False)
    owners: list[int] | None = field(default=None, init=False)

    @property
    def piece(self) -> int:
        """The elements of a piece, whole cache lines of every dtype."""
        lines = BUFFER_BYTES // SLOTS // _CACHE_LINE
        return lines * _CACHE_LINE // self.vector.dtype.itemsize

    def fill(self) -> None:
        """Pack what has to be, and copy the first piece to this rank's buffer of the next call."""
        if self.vector.layout is not None:
            self.vector.fill(self._whole(), self._prescale())
        buffer = self.memory.next_buffer(SLOTS * self.piece, self.vector.dtype)
        self._fill(buffer, 0)

    def reduce(self, label: str) -> None:
        """Write the result to the tensors."""
        whole, numel = self._whole(), self.vector.numel
        buffers = self.memory.buffers(SLOTS * self.piece, self.vector.dtype)
        mine = buffers[self.memory.rank]
        for number, start in enumerate(range(0, numel, self.piece)):
            following = start + self.piece
            if following < numel:
                self._fill(mine, number + 1)
            slot, length = self._slot(number), min(self.piece, numel - start)
            self._reduce([buffer[slot:][:length] for buffer in buffers], start)
            self.memory.barrier(f"step {number + 1} of {label}", self.runner.timeout)
            self.runner.transport.steps += 1
            whole[start:following].copy_(buffers[0][slot:][:length])
        self.vector.store(whole, self.postscale)

    def _whole(self) -> Tensor:
        """Return this rank's vector, which the result replaces."""
        return self.vector.buffer(self.runner.packed)

    def _prescale(self) -> float:
        return self.op.prescale(self.vector.dtype, self.runner.transport.size)

    def _slot(self, number: int) -> int:
        return number % SLOTS * self.piece

    def _fill(self, buffer: Tensor, number: int) -> None:
        """Copy a piece of the vector to its slot."""
        source = self._whole()[number * self.piece :][: self.piece]
        slot = buffer[self._slot(number) :][: source.numel()]
        # What is packed is scaled already.
        scale = self._prescale() if self.vector.layout is None else 1.0
        if scale == 1.0:
            slot.copy_(source)
        else:
            torch.mul(as_real(source), scale, out=as_real(slot))

    def _reduce(self, pieces: Sequence[Tensor], start: int) -> None:
        """Make this rank's share of the first rank's piece the result."""
        op, size, numel = self.op, len(pieces), pieces[0].numel()
        line = _CACHE_LINE // pieces[0].element_size()
        first, behind_last = piece_bounds(-(-numel // line), size, self.memory.rank)
        low, high = first * line, min(behind_last * line, numel)
        mine = [piece[low:high] for piece in pieces]
        if self.at_once:
            joins: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = [
                (tuple(range(size)), (1,) * size)
            ]
        else:
            joins = [((left, right), behind) for left, right, behind in pairs(size)]
        for ranks, behind in joins:
            parts = tuple(mine[rank] for rank in ranks)
            piece = Piece(parts, parts[0], start + low)
            segments = self.vector.segments
            op.reduce(Operands((piece,), self.vector.numel, segments, None, behind))
        op.finish(mine[0], size)
