"""From a case to a row: refuse wrong answers, then time everything together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.kernels import timing
from bench.kernels.case import Case, Contender, WrongAnswer
from bench.kernels.inputs import copy_roof, read_roof
from bench.kernels.timing import DEVICE, Call, Limits, Times

OURS, COPY, READ, EMPTY = "ours", "copy", "sum", "empty launch"
# Timed beside some rows; they are no peers.
ONE_SEGMENT, ONE_DOT = "one segment", "one torch.dot"
TWO, TWO_APART = "two launches", "two launches, the second when the first has ended"
# Calls of less traffic are also replayed from a graph; the fastest GPU moves this in some 15 us.
REPLAY_BELOW = 64 << 20
_REPLAY = " (replayed)"


@dataclass(frozen=True)
class Row:
    """One measured row. JSON has the same fields; the first seven are those of its case.

    times: seconds by name: ours, every peer, the roof and what else was timed beside; copy_traffic:
    bytes that the roof moves: a copy or, where `times` has it, a sum; hosts: seconds of the host
    for a call, by name (CUDA); replayed: names whose replay from a graph was faster than their
    launch; captured: whether ours, replayed from a graph, is right, None where that was not tried;
    notes: by peer, why its answer is worth less or why it was left out.
    """

    kernel: str
    series: str
    label: str
    size: int
    traffic: int
    elements: int
    tensors: int
    times: dict[str, Times]
    peers: list[str]
    copy_traffic: int
    hosts: dict[str, float] = field(default_factory=dict)
    replayed: list[str] = field(default_factory=list)
    captured: bool | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.label}"

    @property
    def seconds(self) -> float:
        return self.times[OURS].median

    @property
    def roof(self) -> float:
        """Bytes per second of the copy, or of the sum, timed in this row."""
        return self.copy_traffic / self.times[READ if READ in self.times else COPY].median

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the least traffic, `*_bytes`."""
        return self.traffic / self.seconds

    @property
    def fraction(self) -> float:
        return self.bandwidth / self.roof

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=lambda name: self.times[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the best peer over ours; above 1, ours is faster."""
        return None if self.best_peer is None else self.over(self.best_peer)

    def over(self, name: str) -> float | None:
        """Return the time of `name` over ours, None where it was not timed in this row."""
        return self.times[name].median / self.seconds if name in self.times else None


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def measure(case: Case, limits: Limits = timing.LIMITS) -> tuple[Row, list[float]]:
    """Return the row of a case and the samples of ours; WrongAnswer if ours is wrong.

    A peer that is wrong or fails is left out, and the row's notes say so. A wrong kernel is not
    timed.
    """
    case.ours.check(case.expected)
    notes: dict[str, str] = {}
    peers = [peer for peer in case.peers if _is_right(peer, case, notes)]
    name, (roof, roof_traffic) = COPY, copy_roof(case.traffic)
    if case.reads and DEVICE == "cuda":
        name, (roof, roof_traffic) = READ, read_roof()
    calls: dict[str, Call] = {OURS: case.ours.call}
    calls |= {peer.name: peer.call for peer in peers} | dict(case.beside)
    hosts: dict[str, float] = {}
    in_graph: bool | None = None
    if DEVICE == "cuda":
        calls[EMPTY] = timing.empty_launch
        hosts = {name: timing.host_seconds(call) for name, call in calls.items()}
        if case.traffic < REPLAY_BELOW and not case.spec.wall:
            graphs = _replays(case, peers, calls, notes)
            in_graph = any(name == OURS for name, _ in graphs)
            for peer in peers:
                if not peer.capturable:
                    notes.setdefault(peer.name, "launched, where the others are replayed")
            calls |= {name + _REPLAY: replay for name, (replay, _) in graphs}
            hosts |= {name + _REPLAY: timing.host_seconds(replay) for name, (replay, _) in graphs}
        hosts[name] = timing.host_seconds(roof)
    calls[name] = roof
    samples = timing.time_together(calls, hosts, limits, case.spec.wall)
    best, replayed = _faster_samples(samples)
    spec = case.spec
    row = Row(
        *(spec.kernel, spec.series, spec.label),
        *(case.size, case.traffic, case.elements, case.tensors),
        times={name: Times.of(values) for name, values in best.items()},
        peers=[peer.name for peer in peers],
        copy_traffic=roof_traffic,
        hosts={name: value for name, value in hosts.items() if not name.endswith(_REPLAY)},
        replayed=replayed,
        captured=in_graph,
        notes=notes,
    )
    return row, best[OURS]


def _is_right(peer: Contender, case: Case, notes: dict[str, str]) -> bool:
    """Return whether a peer gives the right answer here; if not, note why."""
    try:
        peer.check(case.expected)
    except Exception as error:  # noqa: BLE001 - a private function that is gone, a compiler's own
        notes[peer.name] = f"left out: {_first_line(error)}"
        return False
    if peer.caveat:
        notes[peer.name] = peer.caveat
    return True


def _replays(
    case: Case, peers: list[Contender], calls: dict[str, Call], notes: dict[str, str]
) -> list[tuple[str, tuple[Call, Any]]]:
    """Return graphs of all that can be captured; WrongAnswer if a replay of ours is wrong."""
    checks = {each.name: each.check for each in (case.ours, *peers) if each.capturable}
    graphs: list[tuple[str, tuple[Call, Any]]] = []
    for name in (*checks, *case.beside, EMPTY):
        try:
            graph = timing.captured(calls[name])
            if name in checks:
                checks[name](case.expected, graph)
        except Exception as error:
            if name == OURS and isinstance(error, WrongAnswer):
                raise
            notes[name] = f"no graph: {_first_line(error)}"
        else:
            graphs.append((name, graph))
    return graphs


def _faster_samples(samples: dict[str, list[float]]) -> tuple[dict[str, list[float]], list[str]]:
    """Return for each call the samples, launched or replayed, with the lower median."""
    best, replayed = {}, []
    for name, values in samples.items():
        if name.endswith(_REPLAY):
            continue
        other = samples.get(name + _REPLAY, values)
        best[name] = min(values, other, key=lambda each: Times.of(each).median)
        if best[name] is not values:
            replayed.append(name)
    return best, replayed


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
