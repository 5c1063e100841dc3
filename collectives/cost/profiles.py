"""What a collective asks of a machine, whatever the machine's rates and the buffer's length.

A profile holds the distinct loads of a node's ranks in every step, so that the cost for any buffer
and any rates is a few operations on small arrays, for 65,536 ranks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.cost.link_rates import LinkRates, Rate
from collectives.schedules.algorithm import BulkStep, Floats, Ints
from collectives.schedules.topology import Topology

DOTS_BYTES = 24
"""Bytes of Adasum's partial products of one segment: a dot and two squared norms in float64."""

# Columns of a rank's load in one step: for each class and direction the peers and the share of the
# buffer in their messages, then the reductions and the share received for them.
_INTRA, _INTER, _REDUCE = 0, 4, 8
_COLUMNS = 10
_SHARES = [[_INTRA + 1, _INTRA + 3], [_INTER + 1, _INTER + 3]]


@dataclass(frozen=True)
class Round:
    """Steps that cost the same.

    Attributes:
        nodes: The loads, [distinct nodes, local ranks, columns].
        times: How many such steps there are.
        reduction: "sum" or "adasum".
        dots: Whether shares are of the partial products, not of the buffer.
        passes: Times that what is received is read, in those of a reduction in pairs.
    """

    nodes: Floats
    times: int
    reduction: str
    dots: bool
    passes: float = 1.0


@dataclass(frozen=True)
class Cost:
    """What one collective takes.

    Attributes:
        seconds: Its time.
        steps: Of its schedule.
        intra: Bytes sent inside nodes, by all ranks.
        inter: Bytes sent between nodes, by all ranks.
        busiest_intra: Most bytes that one rank sends or receives inside its node.
        busiest_inter: Most bytes that one node sends to or receives from others.
        memory: Most bytes that a rank has received and not yet reduced.
    """

    seconds: float
    steps: int
    intra: float
    inter: float
    busiest_intra: float
    busiest_inter: float
    memory: float


@dataclass(frozen=True)
class Profile:
    """A collective's steps and bytes, in shares of (buffer, partial products).

    Attributes:
        rounds: The steps that differ.
        steps: How many the schedule has.
        busiest: What ranks send or receive inside nodes, and what nodes exchange with others, each
            [distinct loads, 2].
        total: Sent by all ranks, [2, (inside nodes, between nodes)].
    """

    rounds: tuple[Round, ...]
    steps: int
    busiest: tuple[Floats, Floats]
    total: Floats

    def cost(self, nbytes: float, rates: LinkRates, segments: int = 1) -> Cost:
        """Return the cost for a buffer of nbytes, in equal pieces whatever its elements.

        segments: How many Adasum projects on their own.
        """
        sizes = np.array([nbytes, DOTS_BYTES * segments])
        seconds = rates.call + sum(
            each.times * (rates.host + _seconds(each, float(sizes[int(each.dots)]), rates))
            for each in self.rounds
        )
        staged = [each.nodes[:, :, _REDUCE + 1].max() for each in self.rounds if not each.dots]
        intra, inter = (sizes @ self.total).tolist()
        busiest = [float((loads @ sizes).max()) for loads in self.busiest]
        memory = float(max(staged, default=0.0) * nbytes)
        return Cost(float(seconds), self.steps, intra, inter, busiest[0], busiest[1], memory)


def _seconds(each: Round, nbytes: float, rates: LinkRates) -> float:
    """Return the time of one step, until the last rank is ready."""
    moved, reduced = times_of(each, nbytes, rates)
    return float((moved + reduced).max())


def times_of(each: Round, nbytes: float, rates: LinkRates) -> tuple[Floats, Floats]:
    """Return how long each rank's messages of a step take, and then its reductions.

    Both are [nodes, local ranks]; nbytes is of what the step's shares are of.
    """
    nodes = each.nodes
    intra, inter = (
        np.maximum(
            *(rate.seconds(nodes[:, :, i], nbytes * nodes[:, :, i + 1]) for i in (start, start + 2))
        )
        for start, rate in ((_INTRA, rates.intra), (_INTER, rates.inter))
    )
    if rates.nic is not None:
        shared = np.maximum(nodes[:, :, _INTER + 1].sum(1), nodes[:, :, _INTER + 3].sum(1))
        queued = rates.inter.alpha + rates.nic * nbytes * shared[:, None]
        inter = np.where(inter > 0, np.maximum(inter, queued), 0.0)
    rate: Rate = getattr(rates, each.reduction)
    read = each.passes * nbytes * nodes[:, :, _REDUCE + 1]
    return np.maximum(intra, inter), rate.seconds(nodes[:, :, _REDUCE], read)


class Profiler:
    """Collects steps, one after the other, into a Profile.

    Args:
        topology: Where the ranks are.
        in_order: Where given, every step that costs something is appended to it, with how many
            steps of the schedule came before, and with the loads of all nodes in their order.
    """

    def __init__(self, topology: Topology, in_order: list[tuple[int, Round]] | None = None) -> None:
        self._topology = topology
        self._in_order = in_order
        self._rounds: dict[tuple[Any, ...], tuple[Floats, int]] = {}
        self._steps = 0
        # [of the buffer or of the partial products, intra or inter, sent or received, rank]
        self._loads = np.zeros((2, 2, 2, topology.size))

    def add(self, step: BulkStep, reduction: str, *, dots: bool = False) -> None:
        """Add a step of the schedule as often as it says, reduced by "sum" or "adasum".

        dots: Whether it is of partial products, which a step needs beside its own messages.
        """
        if not dots:
            self._steps += step.times
        if not len(step.source):
            return
        size, local = self._topology.size, self._topology.local_size
        table = np.zeros((size, _COLUMNS))
        # Adasum of n vectors is n - 1 reductions of pairs, or two passes by a Gram matrix; a sum of
        # n is one pass.
        adasum = reduction == "adasum"
        for column, values in _columns(step, size, local, in_pairs=adasum and not step.by_tree):
            table[:, column] += values
        self._loads[int(dots)] += step.times * table.T[_SHARES]
        passes = _passes(int(np.max(step.ways))) if adasum and step.by_tree else 1.0
        self._add_round(table, step.times, reduction, dots=dots, passes=passes)

    def reduce_gathered(self, reduction: str) -> None:
        """Add the reduction of all ranks' vectors on every rank, after the steps."""
        others = self._topology.size - 1
        if others:
            table = np.zeros((self._topology.size, _COLUMNS))
            table[:, _REDUCE] = others if reduction == "adasum" else 1
            table[:, _REDUCE + 1] = others
            self._add_round(table, 1, reduction, dots=False)

    def profile(self) -> Profile:
        """Return the profile of what was added."""
        local = self._topology.local_size
        ranks, nodes = self._loads[:, 0], self._loads[:, 1].reshape(2, 2, -1, local).sum(axis=3)
        return Profile(
            rounds=tuple(
                Round(matrix, times, reduction, dots, passes)
                for (reduction, dots, passes, *_), (matrix, times) in self._rounds.items()
            ),
            steps=self._steps,
            busiest=(_distinct(ranks.reshape(2, -1).T), _distinct(nodes.reshape(2, -1).T)),
            total=self._loads[:, :, 0].sum(axis=2),
        )

    def _add_round(
        self, table: Floats, times: int, reduction: str, *, dots: bool, passes: float = 1.0
    ) -> None:
        local = self._topology.local_size
        if self._in_order is not None:
            nodes = table.reshape(-1, local, _COLUMNS)
            self._in_order.append((self._steps - 1, Round(nodes, times, reduction, dots, passes)))
        matrix = _distinct(table.reshape(-1, local * _COLUMNS)).reshape(-1, local, _COLUMNS)
        key = (reduction, dots, passes, matrix.shape[0], matrix.tobytes())
        _, before = self._rounds.get(key, (matrix, 0))
        self._rounds[key] = (matrix, before + times)


def _passes(others: int) -> float:
    """Return what a Gram matrix and a blend of a vector with others read and write a byte received.

    It is in units of a reduction in pairs, which reads both twice and writes one: of n vectors
    (2 n + 1) / 5 for n - 1 that are received.
    """
    return (2 * others + 3) / (5 * others)


def _columns(
    step: BulkStep, size: int, local: int, *, in_pairs: bool
) -> Iterator[tuple[int, Floats]]:
    """Yield (column, values by rank); columns may come more than once, to be added.

    in_pairs: whether every received message is a reduction of its own.
    """
    source, target, *rest = np.broadcast_arrays(*step[:4])
    share, ways = rest[0].astype(float), rest[1]
    one_source, one_target = np.divmod(np.unique(source * size + target), size)
    within = source // local == target // local
    one_within = one_source // local == one_target // local
    for start, messages, pairs in ((_INTRA, within, one_within), (_INTER, ~within, ~one_within)):
        for way, ranks, ends in ((0, source, one_source), (2, target, one_target)):
            yield start + way, _by_rank(ends[pairs], np.ones(int(pairs.sum())), size)
            yield start + way + 1, _by_rank(ranks[messages], share[messages], size)
    reduced = np.flatnonzero(ways > 0)
    count = np.ones(len(reduced)) if in_pairs else 1.0 / ways[reduced]
    yield _REDUCE, _by_rank(target[reduced], count, size)
    yield _REDUCE + 1, _by_rank(target[reduced], share[reduced], size)


def _by_rank(ranks: Ints, values: Floats, size: int) -> Floats:
    return np.bincount(ranks, values, size).astype(np.float64)


def _distinct(rows: Floats) -> Floats:
    # Sums of shares that are equal but for rounding count as one. Rows are compared as bytes:
    # np.unique(axis=0) makes a structure of every column, which is slow for hundreds of them.
    rounded = np.ascontiguousarray(np.round(rows, 15))
    row = np.dtype((np.void, rounded.shape[1] * rounded.itemsize))
    _, first = np.unique(rounded.view(row).reshape(-1), return_index=True)
    return rows[first]
