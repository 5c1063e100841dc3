"""All-reduces through memory that a host's ranks share: no message is sent.

Every rank copies its vector to its buffer before it signals the call. Once all ranks have signalled
it, the result is computed in one of two ways:

- one-shot: each rank reads all vectors and computes the whole result by itself. This is for small
  vectors, for which a second wait would cost more than the reading.
- two-shot: each rank reduces its slice of all vectors; after a barrier every rank copies the other
  ranks' slices. For an operator that needs whole segments, ranks exchange a table of their slices
  in between (dot products, or Gram matrices), which is one more wait.

A sum is the balanced tree over the ranks, the order of `rd` and `rechd`, in one pass.

node_launches.py does the same on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

import torch

from collectives.call import Call
from collectives.execution.all_reduce import AllReduceOptions, Runner
from collectives.execution.vectors import Vector
from collectives.reducers import TREE_RANKS, Needs, Operands, Piece, Reducer, Sum, is_plain_sum
from collectives.schedules.halving import balanced_tree
from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import piece_bounds
from collectives.schedules.spec import AllReduceSpec, spec_for
from collectives.transport.symmetric_memory import (
    BUFFER_BYTES,
    TABLE_BYTES,
    SymmetricMemory,
)
from collectives.tree_order import in_order

Tensor = torch.Tensor
# One-shot is faster up to so many bytes of one vector, and of all vectors together.
_ONE_SHOT_BYTES, _READ_BYTES = 256 * 1024, 2 * 1024 * 1024
_LINE = 64
_TREE_SUM = in_order(Sum, "tree")


def plan_host_all_reduce(runner: Runner, call: Call) -> HostAllReduce | None:
    """Return a plan to run a call in shared memory; None if it goes by messages.

    All ranks decide alike, since they make equal calls.
    """
    memory, op = runner.transport.symmetric_memory, call.op
    if memory is None or memory.size == 1 or not op.reduces_in_shared_memory:
        return None
    if call.kind not in ("all_reduce", "grouped_all_reduce") or not call.tensors:
        return None
    options, tensors = AllReduceOptions.of(call), call.tensors
    if options.prescale != 1.0:
        return None
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
    options, vector = options.as_vector(tensors)
    if vector is None or not 0 < (nbytes := vector.nbytes) <= BUFFER_BYTES:
        return None
    spec, size = spec_for(options.specs, vector.numel), memory.size
    small = nbytes <= min(_ONE_SHOT_BYTES, _READ_BYTES // size)
    at_once = _at_once(spec, op, vector, size, small=small)
    if at_once is None:
        return None
    if at_once and Needs.ONE_TREE in op.needs:
        # An algorithm that was named must have the bits of `direct` by messages, whose tables are
        # per slice: one-shot only for `auto`.
        small = small and spec.outer == "auto"
    repeats = call.request is not None
    return HostAllReduce(vector, op, small, at_once, options.postscale, runner, memory, repeats)


def _at_once(
    spec: AllReduceSpec, op: Reducer, vector: Vector, size: int, *, small: bool
) -> bool | None:
    """Return True if the operator gets all operands at once, False for pairs, None for messages."""
    name = spec.outer
    if op.needs is Needs.ANY_ORDER:
        if name == "direct" and spec.inner is None:
            return True
        by_pairs = spec.inner is None and spec.shards == 1
        return False if by_pairs and name in ("auto", "rd", "rechd", "vhdd") else None
    if Needs.BALANCED_TREE in op.needs:
        # All algorithms that can carry the operator compute the same tree.
        return True
    if spec.inner is not None:
        return None
    if Needs.ONE_TREE in op.needs:
        rows = 1 if vector.segments is None else len(vector.segments) - 1
        by_tree = op.reads_tree and op.reads_tree_of(vector.dtype)
        # All of these compute one tree; a Gram matrix gives it without rounding after each level.
        named = name == "direct" or (name in ("rd", "rechd", "vhdd") and size > 2)
        if by_tree and (named or (name == "auto" and size in TREE_RANKS)):
            return True if rows * 16 * size * size <= TABLE_BYTES else None
        in_slices = size == 2 and name in ("auto", "rechd", "vhdd") and rows * 24 <= TABLE_BYTES
        # An operator that reads trees, but not of this dtype, goes by `vhdd` on these ranks.
        as_rd = name == "rd" or (name == "auto" and not (op.reads_tree and size in TREE_RANKS))
        return False if in_slices or (small and as_rd) else None
    return True if name == "auto" or Needs.ALL_OPERANDS in algorithm(name).meets else None


@dataclass(eq=False)
class HostAllReduce:
    """One all-reduce of one rank's tensors: `fill`, then once all ranks have signalled, `run`.

    It holds the tensors, and may be run any number of times.

    Attributes:
        whole: Whether every rank computes the whole result (one-shot).
        at_once: Whether the operator gets all ranks' operands at once, not in pairs.
        repeats: Whether a request runs it repeatedly; in a single run, binding the operator would
            cost more than it saves.
        bound: A function for each set of buffers, by the address of the first buffer; calls use two
            sets alternately.
    """

    vector: Vector
    op: Reducer
    whole: bool
    at_once: bool
    postscale: float
    runner: Runner
    memory: SymmetricMemory
    repeats: bool
    bound: dict[int, Callable[[str], Tensor]] = field(default_factory=dict)

    by_messages = False

    def __post_init__(self) -> None:
        size, rank = self.memory.size, self.memory.rank
        self.prescale = self.op.prescale(self.vector.dtype, size)
        # Dot products depend on the cuts between slices: cut as algorithms by messages do.
        needs = self.op.needs
        self.one_tree = needs is not Needs.ANY_ORDER and Needs.ONE_TREE in needs
        line = 1 if self.one_tree else _LINE // self.vector.dtype.itemsize
        lines = -(-self.vector.numel // line)
        first, last = (0, lines) if self.whole else piece_bounds(lines, size, rank)
        self.slice = first * line, min(last * line, self.vector.numel)
        # No other rank reads this rank's own slice, so it is not copied to the buffer.
        self.own = not self.whole and self.vector.layout is None and self.prescale == 1.0

    def __str__(self) -> str:
        return f"{self.op}, {'one' if self.whole else 'two'}-shot, {self.nbytes} B"

    @property
    def by_tree(self) -> bool:
        """Whether the operator gets all ranks' operands with their tree."""
        return self.at_once and self.one_tree

    @property
    def nbytes(self) -> int:
        """The bytes that `fill` copies."""
        return self.vector.nbytes

    def rebind(self, call: Call) -> bool:
        """Take the call's tensor in place of the last one; False if it needs another plan."""
        self.bound.clear()
        return self.vector.rebind(call.tensors)

    def release(self) -> None:
        """Drop the tensors, until `rebind`."""
        self.bound.clear()
        self.vector.release()

    def ready(self) -> bool:
        """Return whether it can run: always."""
        return True

    def fill(self) -> None:
        """Copy the tensors to this rank's buffer for the next call to signal."""
        buffer = self.memory.next_buffer(self.vector.numel, self.vector.dtype)
        if self.own:
            self.vector.fill_around(*self.slice, buffer)
        else:
            self.vector.fill(buffer, self.prescale)

    def run(self, call: Call) -> None:
        """Write the result to the tensors."""
        vectors = self.memory.buffers(self.vector.numel, self.vector.dtype)
        address = vectors[0].data_ptr()
        if address not in self.bound:
            self.bound[address] = self._bind(vectors)
        self.vector.store(self.bound[address](call.label), self.postscale)

    def _bind(self, vectors: Sequence[Tensor]) -> Callable[[str], Tensor]:
        """Return a function that reduces these buffers, and returns the result."""
        # Not through `self`: the reference cycle would keep the tensors until it is collected.
        op, memory, timeout, whole = self.op, self.memory, self.runner.timeout, self.whole
        transport, (start, stop) = self.runner.transport, self.slice
        # In two-shot, the ranks write the slices of the result to the first rank's buffer.
        out = self.vector.buffer(self.runner.packed) if whole else vectors[0]
        target, tables = out[start:stop], _Tables(memory, timeout)
        parts = [*map(itemgetter(slice(start, stop)), vectors)]
        if self.own:
            parts[memory.rank] = self.vector.tensors[0][start:stop]
        steps = self._steps(parts, target, start, tables)

        def run(label: str) -> Tensor:
            tables.where = f"step 1 of {label}"
            for step in steps:
                step()
            op.finish(target, memory.size)
            if not whole:
                memory.barrier(f"step 2 of {label}", timeout)
                transport.steps += 1
            return out

        return run

    def _steps(
        self, parts: Sequence[Tensor], target: Tensor, start: int, tables: _Tables
    ) -> list[Callable[[], None]]:
        """Return bound reductions that compute this rank's part of the result."""
        op, size = self.op, len(parts)
        numel, segments = self.vector.numel, self.vector.segments
        pieces = (Piece(tuple(parts), target, start),)
        operands = Operands(pieces, numel, segments, None, (1,) * size)
        if self.by_tree:
            gather = None if self.whole else tables.gather
            operands = replace(operands, tree=balanced_tree(size), gather_partials=gather)
        if self.at_once:
            return [op.bind(operands) if self.repeats else partial(op.reduce, operands)]
        if size > 2 and not self.whole and is_plain_sum(op):
            # One pass has the same bits as pairs, at half of the memory traffic.
            return [_TREE_SUM.bind(operands)]
        sums = tables.sum if self.one_tree and not self.whole else None
        places, steps = list(parts), []
        between = self._between(target) if self.whole else parts
        for i, (left, right, *behind) in enumerate(balanced_tree(size)):
            into = target if i == size - 2 else between[i if self.whole else left]
            pair = (Piece((places[left], places[right]), into, start),)
            operands = Operands(pair, numel, segments, sums, tuple(behind))
            steps.append(op.bind(operands) if self.repeats else partial(op.reduce, operands))
            places[left] = into
        return steps

    def _between(self, target: Tensor) -> list[Tensor]:
        """Return memory for the intermediate results of a tree of pairs."""
        # The same alignment on every rank gives the same bits on all of them.
        width = -(-target.nbytes // _LINE) * _LINE // target.element_size()
        count = self.memory.size - 2
        if count == 0:
            return []
        scratch = self.runner.workspace.take(width * count, target)
        return [scratch[i * width :][: target.numel()] for i in range(count)]


@dataclass
class _Tables:
    """Exchanges the tables of all ranks' slices. where: The step's name in errors."""

    memory: SymmetricMemory
    timeout: float
    where: str = ""

    def gather(self, table: Tensor) -> Tensor:
        """Return all ranks' tables, [ranks, ...]; all ranks must call this equally often."""
        row = table.detach().reshape(-1).numpy()
        rows = self.memory.gather_row(row, self.where, self.timeout)
        return torch.from_numpy(rows).contiguous().view(-1, *table.shape)

    def sum(self, table: Tensor) -> None:
        """Add all ranks' tables, in place."""
        table.copy_(self.gather(table).sum(0))
