"""All-reduces through the buffers of ranks that share memory.

Every rank copies its vector to its buffer before it signals the call; once all have signalled it,
no message is left to send. The bits are those of the algorithm by messages:

- one-shot, for `rd` of small vectors: each rank carries out the whole tree by itself, reading n
  vectors.
- tree, for `rd` where a reduction costs more than waiting for another rank's: each pair's first
  rank does it for all.
- two-shot, for `rechd` and `vhdd`: each rank reduces its share of all vectors and takes the rest
  from the others; Adasum does so level by level. With fewer processors than ranks some ranks do
  the others' shares, too, and those sleep until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.shared_memory_levels import Level, Part, levels_of_rank, pairs
from collectives.execution.vectors import FlatVector, PackedVector, vector_of
from collectives.reducers import Operands, Piece, Reducer
from collectives.schedules.folding import Fold
from collectives.schedules.partition import split_bounds
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.trace import span
from collectives.transport.shared_memory.rank_buffers import RankBuffers
from collectives.transport.shared_memory.symmetric_memory import (
    BUFFER_BYTES,
    TABLE_BYTES,
    SymmetricMemory,
)

__all__ = ["ONE_SHOT_BYTES", "SharedMemoryAllReduce", "plan_shared_memory_all_reduce"]

Tensor = torch.Tensor
Method = Literal["one-shot", "tree", "two-shot"]

# Up to here, and for one-shot to so much of all ranks together, a wait costs more than a reduction.
ONE_SHOT_BYTES = 256 * 1024
_MAX_READ_BYTES = 2 * 1024 * 1024
# A row of dot products and norms of a segment.
_ROW_BYTES = 24
_CACHE_LINE = 64


def plan_shared_memory_all_reduce(
    runner: Runner,
    kind: str,
    options: Mapping[str, Any],
    tensors: Sequence[Tensor],
    op: Reducer,
) -> SharedMemoryAllReduce | None:
    """Return how a call runs in shared memory; None where it goes by messages.

    Every rank concludes the same from equal descriptions.
    """
    memory = runner.transport.symmetric_memory
    size = runner.transport.size
    if memory is None or size == 1 or kind not in ("all_reduce", "grouped_all_reduce"):
        return None
    if not (op.reduces_in_shared_memory and tensors and options["prescale"] == 1.0):
        return None
    vector = vector_of(tensors, options.get("segments"), options["postscale"], BUFFER_BYTES)
    if vector is None:
        return None
    spec = spec_for(parse_all_reduce_spec(options["algorithm"]), vector.numel)
    method = _method_of(spec, vector, size, op, measured=runner.link_rates is not None)
    return None if method is None else SharedMemoryAllReduce(runner, memory, vector, op, method)


class SharedMemoryAllReduce:
    """One all-reduce of one rank's tensors: `fill`, then once all ranks have signalled, `reduce`.

    It holds the tensors, and may be run any number of times.

    Attributes:
        nbytes: Of the vector that all ranks reduce.
    """

    def __init__(
        self,
        runner: Runner,
        memory: SymmetricMemory,
        vector: FlatVector | PackedVector,
        op: Reducer,
        method: Method,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._vector = vector
        self._op = op
        self._method = method
        self._timeout = runner.timeout
        # Ranks' buffers take turns, so what is bound to them is kept for both.
        self._bound: list[tuple[RankBuffers, int, Callable[[str], Tensor]]] = []
        self.nbytes = vector.numel * vector.dtype.itemsize

    def fill(self) -> None:
        """Copy the tensors to this rank's buffer of the call to be signalled next."""
        self._vector.fill(self._memory.next_buffer(self._vector.numel, self._vector.dtype))

    def reduce(self, label: str) -> None:
        """Write the result to the tensors."""

        def name() -> str:
            call = label.partition(" (call ")[0]
            return f"{call}: {self._op}, {self._method}, {self.nbytes} B"

        buffers = self._memory.buffers(self._vector.numel, self._vector.dtype)
        workers = self._memory.workers
        with span(name):
            bound = [
                run for known, count, run in self._bound if (known, count) == (buffers, workers)
            ]
            if not bound:
                bound = [self._bind(buffers, workers)]
                self._bound = [*self._bound[-1:], (buffers, workers, bound[0])]
            self._vector.store(bound[0](label))

    def _bind(self, buffers: RankBuffers, workers: int) -> Callable[[str], Tensor]:
        """Return what reduces these buffers and returns the result, by the label of the call."""
        if self._method == "one-shot":
            return self._bind_tree(buffers.vectors)
        if self._op.needs_one_tree:
            return self._bind_levels(buffers, workers if self._method == "two-shot" else 0)
        return self._bind_slice(buffers)

    def _bind_tree(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """All of what `rd` makes of all ranks' vectors, which are only read.

        Between them stand buffers aligned alike on every rank, so that all get the same bits.
        """
        op, segments, size = self._op, self._vector.segments, len(vectors)
        out = self._vector.target(self._runner.packed)
        width = -(-out.nbytes // _CACHE_LINE) * _CACHE_LINE // out.element_size()
        scratch = self._runner.workspace.take(width * (size - 2), out) if size > 2 else out
        operands = [*vectors]
        steps = []
        for i, (left, right) in enumerate(pairs(size)):
            target = out if i == size - 2 else scratch[i * width :][: out.numel()]
            steps.append(_bind_two(operands[left], operands[right], target, op, segments))
            operands[left] = target

        def run(label: str) -> Tensor:
            for step in steps:
                step()
            op.finish(out, size)
            return out

        return run

    def _bind_slice(self, buffers: RankBuffers) -> Callable[[str], Tensor]:
        """Make the first vector the result: this rank its slice, which no other rank touches."""
        vectors, op, memory = buffers.vectors, self._op, self._memory
        numel, size = self._vector.numel, len(vectors)
        line = _CACHE_LINE // vectors[0].element_size()
        bounds = split_bounds(-(-numel // line), size)
        start, stop = bounds[memory.rank] * line, min(bounds[memory.rank + 1] * line, numel)
        mine = [buffers.part(other, start, stop) for other in range(size)]
        steps = [
            _bind_two(mine[left], mine[right], mine[left], op, None) for left, right in pairs(size)
        ]

        def run(label: str) -> Tensor:
            for step in steps:
                step()
            op.finish(mine[0], size)
            memory.barrier(f"step 1 of {label}", self._timeout)
            return vectors[0]

        return run

    def _bind_levels(self, buffers: RankBuffers, workers: int) -> Callable[[str], Tensor]:
        """Make the first vector the result, in each level each pair's first vector the pair's."""
        memory = self._memory
        tree = levels_of_rank(len(buffers.vectors), workers, memory.rank)
        levels = [
            (level, self._bind_parts(buffers, level, mine, finish=number + 1 == tree.depth))
            for number, (level, mine) in enumerate(tree.levels)
        ]

        def run(label: str) -> Tensor:
            for number, (level, reduce_parts) in enumerate(levels):
                where = f"step {number + 1} of {label}"
                if reduce_parts is not None:
                    reduce_parts(where)
                elif level.shared:
                    memory.barrier(where, self._timeout)
                if number + 1 < tree.depth:
                    memory.barrier(where, self._timeout)
            where = f"step {tree.depth + 1} (the end) of {label}"
            memory.barrier(where, self._timeout, tree.left_out, last=True)
            return buffers.vectors[0]

        return run

    def _bind_parts(
        self, buffers: RankBuffers, level: Level, mine: Sequence[Part], *, finish: bool
    ) -> Callable[[str], None] | None:
        """This rank's parts of a level, each in a vector of its own, one behind the other."""
        if not mine:
            return None
        op, segments = self._op, self._vector.segments
        numel, size = self._vector.numel, len(buffers.vectors)
        bounds = split_bounds(numel, Fold(size).leaves)
        pieces = []
        for i, part in enumerate(mine):
            start, stop = bounds[part.start], bounds[part.stop]
            left, right = (buffers.part(rank, start, stop) for rank in (part.left, part.right))
            pieces.append(Piece((left, right), left, i * numel + start))
        repeated = _repeated(None if segments is None else tuple(segments), numel, len(mine))
        sums = _PartialSums(self._memory, level, mine, self._timeout) if level.block > 1 else None
        reduce = op.bind(Operands(tuple(pieces), len(mine) * numel, repeated, sums))

        def run(where: str) -> None:
            if sums is not None:
                sums.where, sums.calls = where, 0
            reduce()
            if sums is not None and sums.calls != 1:
                raise TypeError(f"{op} called sum_partials {sums.calls} times, not once")
            for piece in pieces if finish else ():
                op.finish(piece.out, size)

        return run


def _method_of(
    spec: AllReduceSpec,
    vector: FlatVector | PackedVector,
    size: int,
    op: Reducer,
    *,
    measured: bool,
) -> Method | None:
    """Return how a range of a specification is carried out here; None for messages.

    measured: whether `auto` may follow what costs least.
    """
    if spec.inner is not None or spec.shards != 1:
        return None
    nbytes = vector.numel * vector.dtype.itemsize
    # An addition is cheaper than waiting, and with two ranks nobody would do anything else.
    small_method: Method = "tree" if op.needs_one_tree and size > 2 else "one-shot"
    limit = ONE_SHOT_BYTES
    if small_method == "one-shot":
        limit = min(limit, _MAX_READ_BYTES // size)
    name = spec.outer
    if name == "auto":
        name = op.algorithm(nbytes, size)
        if measured and not op.needs_one_tree:
            name = "rd" if nbytes <= limit else "rechd"
    if name == "rd" and nbytes <= limit:
        return small_method
    fits = vector.rows * _ROW_BYTES <= TABLE_BYTES or not op.needs_one_tree
    return "two-shot" if name in ("rechd", "vhdd") and fits else None


def _bind_two(
    left: Tensor, right: Tensor, out: Tensor, op: Reducer, segments: Sequence[int] | None
) -> Callable[[], None]:
    return op.bind(Operands((Piece((left, right), out, 0),), out.numel(), segments, None))


@dataclass
class _PartialSums:
    """Gives the table of each of a rank's parts the sums over all parts of its pair."""

    memory: SymmetricMemory
    level: Level
    mine: Sequence[Part]
    timeout: float
    where: str = ""
    calls: int = 0

    def __call__(self, tables: Tensor) -> None:
        self.calls += 1
        level, mine = self.level, self.mine
        # Numpy's operations on a few numbers cost a third of torch's.
        rows = tables.detach().view(len(mine), -1).numpy()
        first, sums = mine[0].leaf, rows
        if level.shared:
            leaves = [part.leaf for part in mine]
            count = len(level.parts)
            sums = self.memory.gather_rows(leaves, rows, count, self.where, self.timeout)
            first = 0
        halves = sums.reshape(-1, level.block, rows.shape[1])
        while halves.shape[1] > 1:
            # In the order in which recursive doubling adds them.
            halves = halves[:, ::2] + halves[:, 1::2]
        for row, part in zip(rows, mine, strict=True):
            row[:] = halves[(part.leaf - first) // level.block, 0]


@lru_cache(maxsize=256)
def _repeated(segments: tuple[int, ...] | None, numel: int, times: int) -> tuple[int, ...]:
    """Return the boundaries of `times` vectors of `numel` elements, one behind the other."""
    one = (0, numel) if segments is None else segments
    return (0, *(i * numel + bound for i in range(times) for bound in one[1:]))
