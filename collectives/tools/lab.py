"""Schedules to draw, list, price and simulate before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from collectives import validation
from collectives.schedules import schedule as plain
from collectives.schedules.topology import Topology, topology_of
from collectives.tools import drawing
from collectives.tools.cost import (
    ASSUMED,
    Cost,
    LinkRates,
    check_op,
    cost_of,
    schedule_for,
    times_of,
    walk,
)

_Event = dict[str, Any]


@dataclass(frozen=True)
class Schedule(plain.Schedule):
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    Attributes:
        name: The name in errors and traces.
        size: Number of ranks.
        chunks: Number of pieces.
        collective: The collective that it computes.
        steps: Generates the steps of each rank, equally many for every rank.
        root: The source of a broadcast, and the destination of a reduce.
        whole_segments: Whether chunk boundaries must lie on segment boundaries, so that each chunk
            has whole segments.
        replicas: Each run of this many consecutive ranks starts with the same contribution (their
            node's).
        gathered: Whether the steps copy every rank's whole vector to every rank; at the end every
            rank reduces all vectors in one n-way pass in rank order. The chunks are then the chunks
            of all vectors, rank 0's first; each rank starts with its own.
        nodes: The number of equal runs of consecutive ranks that share a host, for pictures, prices
            and traces; not used in a run.
        op: The operator for prices and traces, "sum" or "adasum"; if steps have two phases, the
            first one sums. Not used in a run.

    Raises:
        TypeError: A field has another type.
        ValueError: Fields contradict each other.

    Examples:
        >>> collectives.schedule("rd", 4).table().splitlines()[0]
        'rd: ranks 4, steps 2, chunks 1'
    """

    nodes: int = 1
    op: Literal["sum", "adasum"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        topology_of(self.size, self.nodes)
        check_op(self.op)

    def draw(self, *, title: str | None = None) -> drawing.Svg:
        """Return a picture of the messages as SVG, which notebooks show.

        Time runs from left to right, ranks are lines, and messages are arrows.

        Args:
            title: The text at the top; None for name, ranks and nodes.
        """
        if title is None:
            on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
            title = f"{self.name}, {self.size} rank{'s' if self.size > 1 else ''}{on}"
        return drawing.svg(self, self.nodes, title)

    def table(self) -> str:
        """Return a table as text: each rank's sends and receives in each step, on one line.

        Steps and chunks are numbered from 0, as in errors.
        """
        return drawing.table(self)

    def cost(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> Cost:
        """Return the cost of a run by the cost model.

        Args:
            nbytes: Length of each rank's buffer.
            rates: The machine; the default, for nodes of H100 GPUs, is assumed, not measured.
            segments: The number of tensors in the buffer: Adasum has dot products for each.
        """
        topology = self._checked(nbytes, segments)
        rounds = walk(self, topology, self._reductions())
        return cost_of(rounds, nbytes, rates, topology, segments)

    def trace(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> str:
        """Return the cost model's simulated run, as JSON in Chrome's trace format.

        Perfetto (ui.perfetto.dev) and chrome://tracing open it: nodes are processes, ranks are
        threads, and steps are slices with their messages. It ends at the time of `cost`, which has
        the same arguments.
        """
        topology = self._checked(nbytes, segments)
        events: list[_Event] = []
        for rank in range(self.size):
            node, first = divmod(rank, topology.local_size)
            # Viewers sort by name unless a position is given, "rank 10" before "rank 2".
            if not first:
                events += _named("process", node, rank, f"node {node}", node)
            events += _named("thread", node, rank, f"rank {rank}", rank)
        events += self._run(topology, nbytes, rates, segments)
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

    def _checked(self, nbytes: float, segments: int) -> Topology:
        validation.nbytes(nbytes)
        validation.integer("segments", segments, 1)
        return topology_of(self.size, self.nodes)

    def _reductions(self) -> tuple[str, ...]:
        """Return the operator for each phase of the steps."""
        ranks = range(self.size if self.op == "adasum" else 0)
        two = any(step.phase for rank in ranks for step in plain.steps_of(self, rank))
        return ("sum", self.op) if two else (self.op,)

    def _run(
        self, topology: Topology, nbytes: float, rates: LinkRates, segments: int
    ) -> Iterator[_Event]:
        """Yield events for each step: the host's time, the messages and the reduction."""
        texts: dict[tuple[int, int], dict[str, list[str]]] = {}
        for message in drawing.messages(self):
            text = f"{message}: {float(message.share) * nbytes:.0f} bytes"
            for rank, way in ((message.source, "sends"), (message.target, "receives")):
                texts.setdefault((message.step, rank), {}).setdefault(way, []).append(text)
        clock = rates.call
        for rank in range(self.size if clock else 0):
            yield from _slice(topology.node_of(rank), rank, "call", 0.0, clock)
        for each in walk(self, topology, self._reductions()):
            if not each.load.any():
                continue
            moved, reduced = times_of(each, nbytes, rates, topology, segments)
            messages, ends = "dot products" if each.dots else "messages", []
            for rank in range(self.size):
                node, begin = topology.node_of(rank), clock
                parts = {"host": rates.host, messages: moved[rank], "reduction": reduced[rank]}
                # Rounds of dot products, and a final reduction, belong to the step before them.
                args = texts.pop((each.step, rank), {})
                yield {**_at("B", node, rank, begin), "name": f"step {each.step}", "args": args}
                for name, seconds in parts.items():
                    if seconds:
                        yield from _slice(node, rank, name, begin, begin + float(seconds))
                    begin += float(seconds)
                yield _at("E", node, rank, begin)
                ends.append(begin)
            # The next step begins when the last rank is ready.
            clock = max(ends)


def schedule(
    spec: str,
    size: int,
    nodes: int = 1,
    *,
    op: Literal["sum", "adasum"] = "sum",
    nbytes: float | None = None,
    device: str | None = None,
) -> Schedule:
    """Return the schedule of a specification, to draw, price, simulate or run it.

    ::

        ring = collectives.schedule("xring#2", 8, nodes=2)
        ring.draw(), ring.table(), ring.cost(1e6).seconds, ring.trace(1e6)

    Args:
        spec: As for `algorithm` of `Group.all_reduce`; limits count elements of 4 bytes.
        size: Number of ranks.
        nodes: The number of equal runs of consecutive ranks that share a host.
        op: "sum", also for Average and other operators without an order; or "adasum", whose result
            depends on the order.
        nbytes: Length of each rank's buffer, if the specification depends on it.
        device: For "auto": "cpu" or "cuda". The schedule is for messages; in a run, NCCL makes most
            sums on GPUs if it is available, and ranks that share memory reduce in it.

    Raises:
        TypeError: An argument has another type.
        ValueError: The specification is invalid, depends on a missing argument, does not fit the
            ranks or the operator, or is a library's algorithm with unknown steps.

    Examples:
        >>> schedule = collectives.schedule("xring", 8, nodes=2)
        >>> schedule.cost(nbytes=1 << 20).steps
        14
        >>> schedule.draw().startswith("<svg")
        True
    """
    topology = topology_of(size, nodes)
    check_op(op)
    chosen, found = schedule_for(spec, topology, nbytes, device, op)
    made = {each.name: getattr(found, each.name) for each in fields(found)}
    # Two levels on one node only reduce inside it: a sum, or an average before Adasum.
    inside = chosen.inner is not None and nodes == 1
    return Schedule(**made | {"name": str(chosen)}, nodes=nodes, op="sum" if inside else op)


def _slice(node: int, rank: int, name: str, begin: float, end: float) -> Iterator[_Event]:
    yield {**_at("B", node, rank, begin), "name": name}
    yield _at("E", node, rank, end)


def _at(kind: str, node: int, rank: int, seconds: float) -> _Event:
    # Begin and end are two events: adjacent slices then share a time stamp after rounding.
    return {"ph": kind, "cat": "schedule", "pid": node, "tid": rank, "ts": seconds * 1e6}


def _named(kind: str, node: int, rank: int, name: str, position: int) -> Iterator[_Event]:
    """Yield the name and position of a process or thread; `rank` is a thread of the process."""
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": position})):
        yield {"name": f"{kind}_{what}", "ph": "M", "pid": node, "tid": rank, "args": args}
