"""What is timed on CUDA, with a fake of torch.cuda that logs, and the order of calls."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bench.kernels import bench_packing, measure, timing
from bench.kernels.measure import COPY, EMPTY, OURS
from bench.kernels.timing import Limits
from tests.bench.kernels.test_measure import SHAPES, Spec

THREE = Limits(seconds=0.0, fewest=3, most=3)


class FakeCuda:
    """Of torch.cuda what the bench uses. Between two events a millisecond an entry has passed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        log = self.log

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = len(log)
                log.append("event")

            def elapsed_time(self, stop: Event) -> float:
                return float(stop.at - self.at - 1)

        stream = SimpleNamespace(wait_stream=lambda other: log.append("wait"))
        graph = SimpleNamespace(replay=lambda: log.append("replay"))
        self.Event, self.Stream, self.CUDAGraph = Event, lambda: stream, lambda: graph
        self.current_stream = self.Stream
        self.stream = self.graph = lambda _: nullcontext()
        self.synchronize = lambda: log.append("synchronize")
        self._sleep = lambda cycles: log.append(f"sleep {cycles}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    for module in (timing, measure):
        monkeypatch.setattr(module, "DEVICE", "cuda")
    monkeypatch.setattr(timing, "_flush", lambda: fake.log.append("flush"))
    monkeypatch.setattr(timing, "_cycles_per_second", lambda: 1e9)
    return fake


def case_of(wall: bool) -> measure.Case:
    """Return packing whose answer is there before: the fake's replay computes nothing."""
    case = bench_packing.case_of(Spec("pack", "aligned", "small", SHAPES, wall=wall))
    case.ours.call()
    ours, *peers = (dataclasses.replace(each, written=()) for each in (case.ours, *case.peers))
    return dataclasses.replace(case, ours=ours, peers=peers)


def test_events_enclose_the_call_alone_after_the_cache_is_flushed(cuda: FakeCuda) -> None:
    calls = {name: lambda name=name: cuda.log.append(name) for name in ("one", "two")}
    samples = timing.time_together(calls, {"one": 0.0, "two": 1e-3}, THREE)
    # Four times what the host takes for the call, and 30 us for the events; rounded down.
    one = ["flush", "sleep 30000", "event", "one", "event"]
    two = ["flush", "sleep 4029999", "event", "two", "event"]
    one, two = [*one, "synchronize"], [*two, "synchronize"]
    rounds = [cuda.log[start : start + 12] for start in range(0, 36, 12)]
    assert all(each in ([*one, *two], [*two, *one]) for each in rounds)
    assert samples == {"one": [1e-3] * 3, "two": [1e-3] * 3}


def test_rows_by_wall_clock_begin_with_the_device_at_rest_and_are_not_replayed(
    cuda: FakeCuda,
) -> None:
    case = case_of(wall=True)
    ours = dataclasses.replace(case.ours, call=lambda: cuda.log.append(OURS), also=None)
    ours = dataclasses.replace(ours, pieces=lambda _: [])
    row, _ = measure.measure(dataclasses.replace(case, ours=ours, peers=(), expected=list), THREE)
    assert {"replay", "event"}.isdisjoint(cuda.log) and row.captured is None
    at = len(cuda.log) - 1 - cuda.log[::-1].index(OURS)
    assert cuda.log[at - 2 : at + 2] == ["flush", "synchronize", OURS, "synchronize"]


def test_small_calls_are_replayed_too_and_a_wrong_replay_raises(cuda: FakeCuda) -> None:
    case = case_of(wall=False)
    row, _ = measure.measure(case, THREE)
    assert row.captured is True and "replay" in cuda.log
    assert set(row.times) == {OURS, *row.peers, COPY, EMPTY} == {*row.hosts}
    # Calls that note nothing last 0 ms here and replays 1 ms: the faster one counts.
    assert row.replayed == [] and row.times[OURS].median == 0.0
    poisoned = bench_packing.case_of(case.spec)
    with pytest.raises(measure.WrongAnswer, match="ours: an element is nan"):
        measure.measure(poisoned, THREE)
