"""All-reduces by `direct` of more than a rank's buffer holds, through the buffers in pieces.

For operators that read trees, which take tables of whole slices before they write an element. So
each rank first collects its slice of all vectors in memory of its own, piece by piece; then reduces
it, as by messages and with their bits; then the results go to all in the same way.

Each buffer has two slots, of which a rank fills one while the others copy from the other, so that
one wait a piece is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.vectors import Vector
from collectives.reducers import Operands, Piece, Reducer
from collectives.schedules.folding import balanced_tree
from collectives.schedules.partition import piece_bounds, split_bounds
from collectives.transport.shared_memory.symmetric_memory import BUFFER_BYTES, SymmetricMemory

Tensor = torch.Tensor
SLOTS = 2
_CACHE_LINE = 64


@dataclass
class Tables:
    """Gathers the tables of all ranks' slices. where: The step, for errors."""

    memory: SymmetricMemory
    timeout: float
    where: str = ""

    def gather(self, table: Tensor) -> Tensor:
        """Return all ranks' tables, [ranks, ...]; all must call this equally often."""
        row, size = table.detach().reshape(1, -1).numpy(), self.memory.size
        rows = self.memory.gather_rows([self.memory.rank], row, size, self.where, self.timeout)
        return torch.from_numpy(rows).contiguous().view(size, *table.shape)


@dataclass(eq=False)
class SharedMemorySlices:
    """One all-reduce of one rank's tensors: `fill`, then once all ranks have signalled, `reduce`.

    Slices are cut as by messages: an operator's tables depend on it.
    """

    vector: Vector
    op: Reducer
    postscale: float
    runner: Runner
    memory: SymmetricMemory
    method: str = field(default="direct in pieces", init=False)
    by_tree: bool = field(default=True, init=False)
    owners: list[int] | None = field(default=None, init=False)

    @property
    def slot(self) -> int:
        """The elements of a slot, and of a piece of a slice of the result."""
        return BUFFER_BYTES // SLOTS // _CACHE_LINE * self._line

    @property
    def piece(self) -> int:
        """The elements of a piece of a slice of a vector; a slot has one of each slice."""
        return self.slot // self.memory.size // self._line * self._line

    @property
    def _line(self) -> int:
        return _CACHE_LINE // self.vector.dtype.itemsize

    def fill(self) -> None:
        """Pack what has to be, and copy the first pieces to this rank's buffer of the next call."""
        if self.vector.layout is not None:
            self.vector.fill(self._whole())
        elif self.vector.padding:
            torch._foreach_zero_(self.vector.padding)
        buffer = self.memory.next_buffer(SLOTS * self.slot, self.vector.dtype)
        self._write_vector(buffer, self._slices(), 0)

    def reduce(self, label: str) -> None:
        """Write the result to the tensors."""
        slices, rank = self._slices(), self.memory.rank
        buffers = self.memory.buffers(SLOTS * self.slot, self.vector.dtype)
        parts = self._parts(slices)
        steps = (f"step {number} of {label}" for number in itertools.count(1))
        # What is this rank's lies behind as many pieces as there are ranks before it.
        read = partial(self._read, buffers, parts, self.piece, rank * self.piece)
        write = partial(self._write_vector, buffers[rank], slices)
        self._pass(-(-len(slices[0]) // self.piece), write, read, steps)
        self._reduce(parts, next(steps))
        read = partial(self._read, buffers, slices, self.slot, 0)
        write = partial(self._write_result, buffers[rank], slices[rank])
        write(0)
        self._wait(next(steps))
        self._pass(-(-len(slices[0]) // self.slot), write, read, steps)
        self.vector.store(self._whole(), self.postscale)

    def _pass(
        self,
        count: int,
        write: Callable[[int], None],
        read: Callable[[int], None],
        steps: Iterator[str],
    ) -> None:
        """Pass pieces from rank to rank; all have written the first one, and waited for that."""
        for number in range(count):
            if number + 1 < count:
                write(number + 1)
            read(number)
            # All have read this slot before it is written again, and written the other one.
            self._wait(next(steps))

    def _write_vector(self, buffer: Tensor, slices: Sequence[Tensor], number: int) -> None:
        """Copy a piece of every other rank's slice to this rank's slot."""
        slot = self._slot(buffer, number)
        for rank, whole in enumerate(slices):
            if rank != self.memory.rank:
                source = _cut(whole, number, self.piece)
                slot[rank * self.piece :][: len(source)].copy_(source)

    def _write_result(self, buffer: Tensor, mine: Tensor, number: int) -> None:
        """Copy a piece of this rank's slice of the result to its slot."""
        source = _cut(mine, number, self.slot)
        self._slot(buffer, number)[: len(source)].copy_(source)

    def _read(
        self, buffers: Sequence[Tensor], targets: Sequence[Tensor], width: int, at: int, number: int
    ) -> None:
        """Copy a piece from every other rank's slot, from `at` on, to that rank's target."""
        for rank, whole in enumerate(targets):
            if rank != self.memory.rank:
                target = _cut(whole, number, width)
                target.copy_(self._slot(buffers[rank], number)[at:][: len(target)])

    def _reduce(self, parts: Sequence[Tensor], where: str) -> None:
        """Make this rank's own part the result."""
        op, size, rank = self.op, self.memory.size, self.memory.rank
        numel = self.vector.numel
        piece = Piece(tuple(parts), parts[rank], piece_bounds(numel, size, rank)[0])
        tables = Tables(self.memory, self.runner.timeout, where)
        tree = balanced_tree(size)
        op.reduce(
            Operands((piece,), numel, self.vector.segments, None, (1,) * size, tree, tables.gather)
        )
        op.finish(parts[rank], size)

    def _parts(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's slice of all vectors: memory for it but for its own vector's."""
        mine = slices[self.memory.rank]
        # Each begins a cache line.
        width = -(-len(mine) // self._line) * self._line
        memory = self.runner.workspace.take(width * (len(slices) - 1), mine)
        parts = [part[: len(mine)] for part in memory.view(-1, width)]
        parts.insert(self.memory.rank, mine)
        return parts

    def _slices(self) -> Sequence[Tensor]:
        """Return the slices of this rank's vector, by the rank that reduces each of all vectors.

        The first is the longest.
        """
        return self._whole().tensor_split(split_bounds(self.vector.numel, self.memory.size)[1:-1])

    def _whole(self) -> Tensor:
        """Return this rank's vector, which the result replaces."""
        return self.vector.buffer(self.runner.packed)

    def _slot(self, buffer: Tensor, number: int) -> Tensor:
        return buffer[number % SLOTS * self.slot :][: self.slot]

    def _wait(self, where: str) -> None:
        self.memory.barrier(where, self.runner.timeout)
        self.runner.transport.steps += 1


def _cut(tensor: Tensor, number: int, width: int) -> Tensor:
    """Return one of a tensor's pieces of `width` elements; the last one is shorter, or empty."""
    return tensor[number * width :][:width]
