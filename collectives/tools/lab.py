"""Schedules to look at: drawn, listed, priced and simulated before anything runs."""

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
        name: How errors and traces call it.
        size: Number of ranks.
        chunks: Number of pieces.
        collective: What it computes.
        steps: Generates the steps of a rank, equally many for every rank.
        root: The rank that a broadcast comes from and a reduce goes to.
        whole_segments: Whether chunk boundaries must lie on segment boundaries, so that a rank that
            reduces a chunk holds whole segments.
        replicas: Each run of this many consecutive ranks starts with the same contribution (their
            node's).
        gathered: Whether the steps copy every rank's whole vector to every rank, which at the end
            reduces all of them in one n-way pass in rank order. The chunks are then those of all
            vectors, rank 0's first; each rank starts with its own.
        nodes: How many equal runs of consecutive ranks share a host, in pictures, prices and
            traces. A run does not ask.
        op: What prices and traces reduce with, "sum" or "adasum"; if steps have two phases, the
            first one sums. A run does not ask.

    Raises:
        TypeError: A field has another type.
        ValueError: A field has no meaning with the others.

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

        Time runs from left to right, a rank is a line, and a message an arrow.

        Args:
            title: What stands above; None for name, ranks and nodes.
        """
        if title is None:
            on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
            title = f"{self.name}, {self.size} rank{'s' if self.size > 1 else ''}{on}"
        return drawing.svg(self, self.nodes, title)

    def table(self) -> str:
        """Return what each rank sends and receives in each step, as text, a line a step and rank.

        Steps and chunks are numbered from 0, as in errors.
        """
        return drawing.table(self)

    def cost(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> Cost:
        """Return the cost of a run by the cost model.

        Args:
            nbytes: Length of each rank's buffer.
            rates: The machine; nodes of H100 GPUs by assumption, not by measurement.
            segments: How many tensors lie in the buffer, which Adasum projects on their own.
        """
        topology = self._checked(nbytes, segments)
        rounds = walk(self, topology, self._reductions())
        return cost_of(rounds, nbytes, rates, topology, segments)

    def trace(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> str:
        """Return the run that the cost model has in mind, as JSON in Chrome's trace format.

        Perfetto (ui.perfetto.dev) and chrome://tracing open it: a process a node, a thread a rank,
        a slice a step with its messages. Its end is the time that `cost` says. Arguments as there.
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
        """Return what the phases of the steps reduce with."""
        ranks = range(self.size if self.op == "adasum" else 0)
        two = any(step.phase for rank in ranks for step in plain.steps_of(self, rank))
        return ("sum", self.op) if two else (self.op,)

    def _run(
        self, topology: Topology, nbytes: float, rates: LinkRates, segments: int
    ) -> Iterator[_Event]:
        """Yield of each step what the host spends, the messages and the reduction."""
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
                # Dot products, and a reduction after all steps, come with the step before them.
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
    """Return the schedule that runs for a specification, to be drawn, priced, simulated or run.

    ::

        ring = collectives.schedule("xring#2", 8, nodes=2)
        ring.draw(), ring.table(), ring.cost(1e6).seconds, ring.trace(1e6)

    Args:
        spec: As for `algorithm` of `Group.all_reduce`; limits count elements of 4 bytes.
        size: Number of ranks.
        nodes: How many equal runs of consecutive ranks share a host.
        op: "sum", which stands for Average and others without an order, too; or "adasum", whose
            order is a part of the answer.
        nbytes: Length of each rank's buffer, if the specification goes by it.
        device: Of "auto": "cpu" or "cuda". The answer is the messages; sums on GPUs leave most
            sizes to NCCL if it is there, and ranks that share memory reduce in it.

    Raises:
        TypeError: An argument has another type.
        ValueError: It is no specification, goes by what is not given, does not fit the ranks or the
            operator, or is a library's algorithm, whose steps are not known.

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
    # Two levels on one node reduce only inside it, and average Adasum's operands there.
    inside = chosen.inner is not None and nodes == 1
    return Schedule(**made | {"name": str(chosen)}, nodes=nodes, op="sum" if inside else op)


def _slice(node: int, rank: int, name: str, begin: float, end: float) -> Iterator[_Event]:
    yield {**_at("B", node, rank, begin), "name": name}
    yield _at("E", node, rank, end)


def _at(kind: str, node: int, rank: int, seconds: float) -> _Event:
    # Begin and end as two events: slices that meet have one time stamp, however it is rounded.
    return {"ph": kind, "cat": "schedule", "pid": node, "tid": rank, "ts": seconds * 1e6}


def _named(kind: str, node: int, rank: int, name: str, position: int) -> Iterator[_Event]:
    """Name a process or thread and place it; a process is named on one of its threads."""
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": position})):
        yield {"name": f"{kind}_{what}", "ph": "M", "pid": node, "tid": rank, "args": args}
