"""From a case to a row: refuse wrong answers, then time everything together."""

from __future__ import annotations

from typing import Any

from bench.kernels.case import Case, Contender, WrongAnswer
from bench.kernels.roofline import copy_roof
from bench.kernels.row import COPY, EMPTY, OURS, Row
from bench.kernels.timing import (
    DEVICE,
    LIMITS,
    Call,
    Limits,
    Times,
    captured,
    empty_launch,
    host_seconds,
    time_together,
)

# Traffic below which calls are also replayed from a graph; the fastest GPU moves it in some 15 us.
REPLAY_BELOW = 64 << 20
_REPLAY = " (replayed)"


def measure(case: Case, limits: Limits = LIMITS) -> tuple[Row, list[float]]:
    """The row of `case`, and the samples behind ours.

    Raises WrongAnswer before anything is timed if the kernel is wrong; a rival that is wrong or
    fails is left out, and the row's notes say so.
    """
    case.ours.check(case.expected)
    notes: dict[str, str] = {}
    rivals = [rival for rival in case.rivals if _sound(rival, case, notes)]
    copy, copy_traffic = copy_roof(case.traffic)
    calls: dict[str, Call] = {OURS: case.ours.call}
    calls |= {rival.name: rival.call for rival in rivals} | dict(case.beside)
    hosts: dict[str, float] = {}
    in_graph: bool | None = None
    if DEVICE == "cuda":
        calls[EMPTY] = empty_launch
        hosts = {name: host_seconds(call) for name, call in calls.items()}
        if case.traffic < REPLAY_BELOW:
            graphs = _replays(case, rivals, calls, notes)
            in_graph = any(name == OURS for name, _ in graphs)
            calls |= {name + _REPLAY: replay for name, (replay, _) in graphs}
            hosts |= {name + _REPLAY: host_seconds(replay) for name, (replay, _) in graphs}
        hosts[COPY] = host_seconds(copy)
    calls[COPY] = copy
    samples = time_together(calls, hosts, limits)
    best, replayed = _faster_way(samples)
    row = Row(
        kernel=case.kernel,
        series=case.series,
        label=case.label,
        size=case.size,
        traffic=case.traffic,
        elements=case.elements,
        tensors=case.tensors,
        times={name: Times.of(values) for name, values in best.items()},
        rivals=[rival.name for rival in rivals],
        copy_traffic=copy_traffic,
        hosts={name: value for name, value in hosts.items() if not name.endswith(_REPLAY)},
        replayed=replayed,
        captured=in_graph,
        notes=notes,
    )
    return row, best[OURS]


def _sound(rival: Contender, case: Case, notes: dict[str, str]) -> bool:
    """Whether the rival gives the answer here; what it throws is torch's to explain."""
    try:
        rival.check(case.expected)
    except Exception as error:  # noqa: BLE001 - a private function that is gone, a compiler's own
        notes[rival.name] = f"left out: {_first_line(error)}"
        return False
    if rival.caveat:
        notes[rival.name] = rival.caveat
    return True


def _replays(
    case: Case, rivals: list[Contender], calls: dict[str, Call], notes: dict[str, str]
) -> list[tuple[str, tuple[Call, Any]]]:
    """Graphs of all that can be captured: ours, rivals, what is timed beside, an empty launch.

    A replay of ours with a wrong answer fails the row.
    """
    checks = {each.name: each.check for each in (case.ours, *rivals) if each.capturable}
    graphs: list[tuple[str, tuple[Call, Any]]] = []
    for name in (*checks, *case.beside, EMPTY):
        try:
            graph = captured(calls[name])
            if name in checks:
                checks[name](case.expected, graph)
        except Exception as error:
            if name == OURS and isinstance(error, WrongAnswer):
                raise
            notes[name] = f"no graph: {_first_line(error)}"
        else:
            graphs.append((name, graph))
    return graphs


def _faster_way(samples: dict[str, list[float]]) -> tuple[dict[str, list[float]], list[str]]:
    """Of each call, launched or replayed, the samples with the lower median."""
    best, replayed = {}, []
    for name, values in samples.items():
        if name.endswith(_REPLAY):
            continue
        other = samples.get(name + _REPLAY)
        if other is not None and Times.of(other).median < Times.of(values).median:
            best[name] = other
            replayed.append(name)
        else:
            best[name] = values
    return best, replayed


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
