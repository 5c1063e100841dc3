"""All-reduces through the buffers of ranks that share memory.

Every rank copies its vector to its buffer before it signals the call; once all have signalled it,
no message is left to send. The bits are those of the algorithm by messages:

- one-shot, for `rd` of small vectors: each rank carries out the whole tree by itself, reading n
  vectors.
- tree, for `rd` where a reduction costs more than waiting for another rank's: each pair's first
  rank does it for all.
- two-shot, for `rechd` and `vhdd`: each rank reduces its share of all vectors and takes the rest
  from the others; Adasum does so level by level.
- direct, for `direct`: the same, of all vectors at once. An operator that reads trees gets the
  tables of all ranks' shares through the tables beside the buffers, so that of any number of ranks
  each waits twice for the others.

An operator that needs all operands at once takes them straight from the buffers: one-shot for
`oneshot` and `bruck`, two-shot for `direct` and the parameter-server shuffles. So does one that
makes the balanced tree by itself, for `rd` and `rechd`, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.call import Call
from collectives.execution.owned_vectors import owners_of
from collectives.execution.phases import auto_of, for_dtype
from collectives.execution.shared_memory_levels import Share, TreeLevel, pairs, tree_levels
from collectives.execution.shared_memory_pieces import SharedMemoryPieces
from collectives.execution.shared_memory_slices import SharedMemorySlices, Tables
from collectives.execution.vectors import Vector, vector_of
from collectives.reducers import Operands, Piece, Reducer
from collectives.schedules import recursive_doubling, recursive_halving
from collectives.schedules.folding import Fold, balanced_tree
from collectives.schedules.partition import piece_bounds, split_bounds
from collectives.schedules.registry import algorithm
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.transport.shared_memory.symmetric_memory import (
    BUFFER_BYTES,
    TABLE_BYTES,
    SymmetricMemory,
)

Tensor = torch.Tensor
Method = Literal["one-shot", "tree", "two-shot", "direct"]

# Up to here, and for one-shot to so much of all ranks together, a wait costs more than a reduction.
ONE_SHOT_BYTES = 256 * 1024
_MAX_READ_BYTES = 2 * 1024 * 1024
# A row of dot products and norms of a segment.
_ROW_BYTES = 24
_CACHE_LINE = 64


def plan_shared_memory_all_reduce(
    runner: Runner, call: Call
) -> SharedMemoryAllReduce | SharedMemoryPieces | SharedMemorySlices | None:
    """Return how a call runs in shared memory; None where it goes by messages.

    Every rank concludes the same from equal calls.
    """
    memory, size = runner.transport.symmetric_memory, runner.transport.size
    tensors, op = call.tensors, call.op
    onto_owners = call.kind == "reduce_to_owners" and op.reads_tree
    kinds = ("all_reduce", "grouped_all_reduce")
    if memory is None or size == 1 or not (call.kind in kinds or onto_owners):
        return None
    chosen = AllReduceOptions.of(call)
    if onto_owners:
        chosen = chosen._replace(specs=parse_all_reduce_spec("auto"))
    if not (op.reduces_in_shared_memory and tensors and chosen.prescale == 1.0):
        return None
    if call.kind != "all_reduce":
        ranges = chosen.by_range(tensors)
        if len(ranges) > 1:
            return None
        ((chosen, _),) = ranges
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
        if not tensor.is_cpu:
            return None
    if not nbytes:
        return None
    vector = vector_of(tensors, chosen.segments)
    if vector is None:
        return None
    # With the padding between slots.
    nbytes = vector.numel * vector.dtype.itemsize
    spec = spec_for(chosen.specs, vector.numel)
    method = _method_of(spec, vector, nbytes, size, op)
    if method is None or (method == "direct" and op.reads_tree and runner.climbs_in_levels(call)):
        return None
    if nbytes > BUFFER_BYTES and op.needs_one_tree:
        # Between two ranks messages copy no more, and onto owners they copy half of it.
        in_slices = method == "direct" and size > 2 and not onto_owners
        if not in_slices or op.prescale(vector.dtype, size) != 1.0:
            return None
        return SharedMemorySlices(vector, op, chosen.postscale, runner, memory)
    if nbytes > BUFFER_BYTES:
        at_once = method == "direct" or op.operands == "all"
        return SharedMemoryPieces(vector, op, at_once, chosen.postscale, runner, memory)
    plan = SharedMemoryAllReduce(vector, op, method, chosen.postscale, runner, memory)
    if onto_owners:
        plan.owners = owners_of(call, size)
    if method == "direct" and vector.layout is None and op.prescale(vector.dtype, size) == 1.0:
        plan.unshared = piece_bounds(vector.numel, size, memory.rank)
    return plan


@dataclass(eq=False)
class SharedMemoryAllReduce:
    """One all-reduce of one rank's tensors: `fill`, then once all ranks have signalled, `reduce`.

    It holds the tensors, and may be run any number of times.

    Attributes:
        owners: Which rank gets the result of each tensor; None for all of all.
        unshared: The elements of its vector that no other rank reads, which are taken from the
            tensor; None where all are copied.
        bound: What reduces each set of buffers; calls take turns with two of them, each known by
            where its first vector lies.
    """

    vector: Vector
    op: Reducer
    method: Method
    postscale: float
    runner: Runner
    memory: SymmetricMemory
    owners: list[int] | None = None
    unshared: tuple[int, int] | None = None
    bound: dict[int, Callable[[str], Tensor]] = field(default_factory=dict)

    @property
    def by_tree(self) -> bool:
        """Whether the operator is handed all ranks' operands with their tree."""
        return self.method == "direct" and self.op.reads_tree

    def fill(self) -> None:
        """Copy the tensors to this rank's buffer of the call to be signalled next."""
        buffer = self.memory.next_buffer(self.vector.numel, self.vector.dtype)
        if self.unshared is None:
            self.vector.fill(buffer, self.op.prescale(buffer.dtype, self.runner.transport.size))
        else:
            self.vector.fill_around(*self.unshared, buffer)

    def reduce(self, label: str) -> None:
        """Write the result to the tensors."""
        vectors = self.memory.buffers(self.vector.numel, self.vector.dtype)
        address = vectors[0].data_ptr()
        if address not in self.bound:
            self.bound[address] = self._bind(vectors)
        result = self.bound[address](label)
        if self.owners is None:
            self.vector.store(result, self.postscale)
            return
        mine = [i for i, owner in enumerate(self.owners) if owner == self.memory.rank]
        self.vector.store_some(result, mine, self.postscale)

    def _bind(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Return what reduces these buffers and returns the result, by the label of the call."""
        if self.method == "one-shot":
            return self._bind_one_shot(vectors)
        if self.method == "direct":
            return self._bind_direct(vectors)
        if self.op.needs_one_tree:
            return self._bind_levels(vectors)
        return self._bind_slice(vectors)

    def _bind_one_shot(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Bind all of what `rd`, or `oneshot`, makes of all ranks' vectors, which are only read.

        Between them stand buffers aligned alike on every rank, so that all get the same bits.
        """
        op, size, out = self.op, len(vectors), self.vector.buffer(self.runner.packed)
        if op.operands == "all" or op.ordered:
            steps = [_bind_all(vectors, out, 0, op, self.vector)]
        else:
            steps = self._bind_pairs(vectors, out)

        def run(label: str) -> Tensor:
            for step in steps:
                step()
            op.finish(out, size)
            return out

        return run

    def _bind_pairs(self, vectors: Sequence[Tensor], out: Tensor) -> list[Callable[[], None]]:
        """Bind each pair of the tree, with memory for what stands between vectors and result."""
        op, segments, size = self.op, self.vector.segments, len(vectors)
        width = -(-out.nbytes // _CACHE_LINE) * _CACHE_LINE // out.element_size()
        scratch = self.runner.workspace.take(width * (size - 2), out) if size > 2 else out
        operands = [*vectors]
        steps = []
        for i, (left, right, behind) in enumerate(pairs(size)):
            target = out if i == size - 2 else scratch[i * width :][: out.numel()]
            steps.append(_bind_two(operands[left], operands[right], target, op, segments, behind))
            operands[left] = target
        return steps

    def _bind_slice(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Bind what makes the first vector the result: in this rank's slice, which is its alone."""
        # Not by way of `self`: what is bound would be a cycle, and keep the tensors until it is
        # collected.
        op, memory, timeout = self.op, self.memory, self.runner.timeout
        numel, size = self.vector.numel, len(vectors)
        line = _CACHE_LINE // vectors[0].element_size()
        first, behind_last = piece_bounds(-(-numel // line), size, memory.rank)
        start, stop = first * line, min(behind_last * line, numel)
        mine = [vector[start:stop] for vector in vectors]
        steps = []
        if op.operands == "all" or op.ordered:
            steps.append(_bind_all(mine, mine[0], start, op, self.vector))
        else:
            for left, right, behind in pairs(size):
                steps.append(_bind_two(mine[left], mine[right], mine[left], op, None, behind))

        def run(label: str) -> Tensor:
            for step in steps:
                step()
            op.finish(mine[0], size)
            memory.barrier(f"step 1 of {label}", timeout)
            return vectors[0]

        return run

    def _bind_direct(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Bind what makes the first vector the result, from this rank's slices of all at once."""
        op, memory, timeout = self.op, self.memory, self.runner.timeout
        transport, size, numel = self.runner.transport, len(vectors), self.vector.numel
        # Cut as by messages: an operator's tables depend on it.
        start, stop = piece_bounds(numel, size, memory.rank)
        mine = [vector[start:stop] for vector in vectors]
        out = mine[0]
        if self.unshared is not None:
            mine[memory.rank] = self.vector.tensors[0][start:stop]
        piece, tables = Piece(tuple(mine), out, start), Tables(memory, timeout)
        operands = Operands((piece,), numel, self.vector.segments, None, (1,) * size)
        if op.reads_tree:
            tree = balanced_tree(size)
            operands = replace(operands, tree=tree, gather_partials=tables.gather)
        reduce = op.bind(operands)

        def run(label: str) -> Tensor:
            tables.where = f"step 1 of {label}"
            reduce()
            op.finish(out, size)
            memory.barrier(f"step 2 of {label}", timeout)
            transport.steps += 1
            return vectors[0]

        return run

    def _bind_levels(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Bind what makes, level by level, each pair's first vector the pair's reduction."""
        memory, timeout = self.memory, self.runner.timeout
        transport = self.runner.transport
        module = recursive_halving if self.method == "two-shot" else recursive_doubling
        levels = tree_levels(module.all_reduce(len(vectors)))
        steps = [
            self._bind_share(vectors, level, finish=level is levels[-1])
            if memory.rank in level.shares
            else None
            for level in levels
        ]

        def run(label: str) -> Tensor:
            for number, (level, reduce_share) in enumerate(zip(levels, steps, strict=True)):
                where = f"step {number + 1} of {label}"
                if reduce_share is not None:
                    reduce_share(where)
                elif level.block > 1:
                    # Others share their dot products.
                    memory.barrier(where, timeout)
                memory.barrier(where, timeout)
                transport.steps += 1
            return vectors[0]

        return run

    def _bind_share(
        self, vectors: Sequence[Tensor], level: TreeLevel, *, finish: bool
    ) -> Callable[[str], None]:
        """Bind this rank's share of a level."""
        op, numel, size = self.op, self.vector.numel, len(vectors)
        share = level.shares[self.memory.rank]
        bounds = split_bounds(numel, Fold(size).leaves)
        start, stop = bounds[share.start], bounds[share.stop]
        left, right = (vectors[rank][start:stop] for rank in (share.left, share.right))
        sums = None
        if level.block > 1:
            sums = _PartialSums(self.memory, level, share, self.runner.timeout)
        piece = Piece((left, right), left, start)
        reduce = op.bind(Operands((piece,), numel, self.vector.segments, sums, share.behind))

        def run(where: str) -> None:
            if sums is not None:
                sums.where, sums.calls = where, 0
            reduce()
            if sums is not None and sums.calls != 1:
                raise TypeError(f"{op} called sum_partials {sums.calls} times, not once")
            if finish:
                op.finish(left, size)

        return run


def _method_of(
    spec: AllReduceSpec, vector: Vector, nbytes: int, size: int, op: Reducer
) -> Method | None:
    """Return how a range of a specification is carried out here; None for messages."""
    in_pairs = op.operands == "pair"
    by_size = spec.outer == "auto" and (op.associative or op.ordered)
    if spec.outer == "auto" and not by_size:
        spec = auto_of(op, nbytes, size)
    if op.reads_tree:
        spec = for_dtype(spec, op, vector.dtype)
    # Shards are a matter of messages to what reduces all at once.
    if spec.inner is not None or (spec.shards != 1 and in_pairs):
        return None
    # An addition is cheaper than waiting, and with two ranks nobody would do anything else.
    by_levels = op.needs_one_tree and in_pairs and size > 2
    small_method: Method = "tree" if by_levels else "one-shot"
    limit = min(ONE_SHOT_BYTES, math.inf if small_method == "tree" else _MAX_READ_BYTES // size)
    name, small = spec.outer, ("rd",) if in_pairs else ("oneshot", "bruck")
    if by_size:
        # A wait is what one-shot saves; beyond that, reading a share of all vectors is cheaper.
        name = small[0] if nbytes <= limit else "direct" if op.ordered else "rechd"
    if name in small and nbytes <= limit:
        return small_method
    if not in_pairs:
        # A rank's slice may cut segments.
        return "two-shot" if algorithm(name).all_at_once and not op.needs_one_tree else None
    rows = 1 if vector.segments is None else len(vector.segments) - 1
    if name == "direct":
        # Two numbers for each pair of ranks.
        fits = rows * 16 * size * size <= TABLE_BYTES or not op.needs_one_tree
        return "direct" if fits else None
    fits = rows * _ROW_BYTES <= TABLE_BYTES or not op.needs_one_tree
    return "two-shot" if name in ("rechd", "vhdd") and fits else None


def _bind_two(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    op: Reducer,
    segments: Sequence[int] | None,
    behind: Sequence[int],
) -> Callable[[], None]:
    pieces = (Piece((left, right), out, 0),)
    return op.bind(Operands(pieces, out.numel(), segments, None, behind))


def _bind_all(
    vectors: Sequence[Tensor], out: Tensor, start: int, op: Reducer, whole: Vector
) -> Callable[[], None]:
    """Bind the reduction of all ranks' elements from `start` on, of the whole vector's."""
    pieces = (Piece(tuple(vectors), out, start),)
    return op.bind(Operands(pieces, whole.numel, whole.segments, None, (1,) * len(vectors)))


@dataclass
class _PartialSums:
    """Sums the table of a rank's share over all shares of its pair."""

    memory: SymmetricMemory
    level: TreeLevel
    share: Share
    timeout: float
    where: str = ""
    calls: int = 0

    def __call__(self, table: Tensor) -> None:
        self.calls += 1
        row = table.detach().view(1, -1).numpy()
        block, leaf, count = self.level.block, self.share.leaf, len(self.level.shares)
        rows = self.memory.gather_rows([leaf], row, count, self.where, self.timeout)
        first = leaf - leaf % block
        halves = rows[first : first + block]
        while len(halves) > 1:
            # In the order in which recursive doubling adds them.
            halves = halves[::2] + halves[1::2]
        row[:] = halves
