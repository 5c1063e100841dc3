"""The run that the cost model has in mind, as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.cost.link_rates import LinkRates
from collectives.cost.profiles import DOTS_BYTES, times_of
from collectives.cost.walker import rounds_of
from collectives.schedules.drawing import messages
from collectives.schedules.schedule import Schedule
from collectives.schedules.topology import Topology

_Event = dict[str, Any]


def chrome_trace(
    schedule: Schedule,
    topology: Topology,
    reductions: Sequence[str],
    nbytes: float,
    rates: LinkRates,
    segments: int = 1,
) -> str:
    """Return a simulated run as JSON in Chrome's trace format.

    A node is a process, a rank a thread: of each step, what the host spends, then the messages,
    then the reduction; then the rank waits until the last one is ready. The end is the time of the
    model. Arguments as for `walk` and `Profile.cost`.
    """
    events: list[_Event] = []
    for rank in range(topology.size):
        node, first = divmod(rank, topology.local_size)
        # Viewers sort by name where nothing else is said, "rank 10" before "rank 2".
        if not first:
            events += _named("process", node, rank, f"node {node}", node)
        events += _named("thread", node, rank, f"rank {rank}", rank)
    run = _run(schedule, topology, reductions, (nbytes, DOTS_BYTES * segments), rates)
    return json.dumps({"traceEvents": [*events, *run], "displayTimeUnit": "ns"})


def _run(
    schedule: Schedule,
    topology: Topology,
    reductions: Sequence[str],
    sizes: tuple[float, float],
    rates: LinkRates,
) -> Iterator[_Event]:
    texts = _texts(schedule, sizes[0])
    clock = rates.call
    for rank in range(topology.size if clock else 0):
        yield from _slice(topology.node_of(rank), rank, "call", 0.0, clock)
    for number, each in rounds_of(schedule, topology, reductions):
        moved, reduced = (times.reshape(-1) for times in times_of(each, sizes[each.dots], rates))
        ends = []
        for rank in range(topology.size):
            node, begin = topology.node_of(rank), clock
            what = "dot products" if each.dots else "messages"
            parts = {"host": rates.host, what: moved[rank], "reduction": reduced[rank]}
            # Dot products, and a reduction after all steps, come with the step before them.
            said = texts.pop((number, rank), {})
            yield {**_at("B", node, rank, clock), "name": f"step {number}", "args": said}
            for name, seconds in parts.items():
                if seconds:
                    yield from _slice(node, rank, name, begin, begin + float(seconds))
                begin += float(seconds)
            yield _at("E", node, rank, begin)
            ends.append(begin)
        clock = max(ends)


def _texts(schedule: Schedule, nbytes: float) -> dict[tuple[int, int], dict[str, list[str]]]:
    """Return what ranks send and receive, by step and rank."""
    texts: dict[tuple[int, int], dict[str, list[str]]] = {}
    for message in messages(schedule):
        text = f"{message}: {float(message.share) * nbytes:.0f} bytes"
        for rank, way in ((message.source, "sends"), (message.target, "receives")):
            texts.setdefault((message.step, rank), {}).setdefault(way, []).append(text)
    return texts


def _slice(node: int, rank: int, name: str, begin: float, end: float) -> Iterator[_Event]:
    yield {**_at("B", node, rank, begin), "name": name}
    yield _at("E", node, rank, end)


def _at(kind: str, node: int, rank: int, seconds: float) -> _Event:
    # Begin and end as two events: slices that meet have one time stamp, however it is rounded.
    return {"ph": kind, "cat": "schedule", "pid": node, "tid": rank, "ts": seconds * 1e6}


def _named(kind: str, node: int, rank: int, name: str, position: int) -> Iterator[_Event]:
    """Name a process or thread and place it; of a process, `rank` is one that it has anyway."""
    for what, said in (("name", {"name": name}), ("sort_index", {"sort_index": position})):
        yield {"name": f"{kind}_{what}", "ph": "M", "pid": node, "tid": rank, "args": said}
