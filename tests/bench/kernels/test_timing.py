"""The order in which calls are timed; on CUDA with a fake of torch.cuda."""

from __future__ import annotations

import dataclasses
import itertools
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from bench.kernels import measure, timing
from bench.kernels.measure import COPY, EMPTY, OURS
from bench.kernels.timing import Limits
from tests.bench.kernels.test_measure import small_cases

THREE = Limits(seconds=0.0, fewest=3, most=3)


def test_cpu_calls_on_both_sides_of_a_limit_are_warmed_equally_often() -> None:
    limit = timing._CPU_WARM[0][0]
    counts = {"faster": 0, "slower": 0}

    def call(name: str, seconds: float) -> None:
        counts[name] += 1
        time.sleep(seconds)

    one_round = timing._cpu_rounds(
        {"faster": lambda: call("faster", 0.6 * limit), "slower": lambda: call("slower", 3 * limit)}
    )
    assert counts["faster"] == counts["slower"]
    one_round(["faster", "slower"])
    assert counts["faster"] == counts["slower"]


class FakeCuda:
    """The part of torch.cuda that the bench uses; it logs what is called.

    The time between two events is a millisecond for each entry between them.
    """

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

        class Stream:
            def wait_stream(self, other: Stream) -> None:
                log.append("wait")

        class CUDAGraph:
            def replay(self) -> None:
                log.append("replay")

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph
        self.current_stream = Stream
        self.stream = self.graph = lambda _: nullcontext()
        self.synchronize = lambda: log.append("synchronize")
        self._sleep = lambda cycles: log.append(f"sleep {cycles}")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(timing, "DEVICE", "cuda")
    monkeypatch.setattr(measure, "DEVICE", "cuda")
    monkeypatch.setattr(timing, "_flush", lambda: fake.log.append("flush"))
    monkeypatch.setattr(timing, "_cycles_per_second", lambda: 1e9)
    return fake


def test_cuda_events_enclose_the_call_alone(cuda):
    calls = {name: lambda name=name: cuda.log.append(name) for name in ("one", "two")}
    samples = timing.time_together(calls, {"one": 0.0, "two": 1e-3}, THREE)
    # Half as much again as the host takes for the call, and 30 us for the events.
    one = ["flush", "sleep 30000", "event", "one", "event"]
    two = ["flush", "sleep 1530000", "event", "two", "event"]
    log = cuda.log
    length = 2 * len(one) + 1
    rounds = [log[start : start + length] for start in range(0, len(log), length)]
    assert len(rounds) == 3
    assert all(
        each in ([*one, *two, "synchronize"], [*two, *one, "synchronize"]) for each in rounds
    )
    assert samples == {"one": [1e-3] * 3, "two": [1e-3] * 3}


def test_cuda_rows_by_wall_clock_are_timed_with_the_device_at_rest_and_never_replayed(cuda):
    case = next(case for case in small_cases() if case.kernel == "pack")
    ours = dataclasses.replace(
        case.ours, call=lambda: cuda.log.append(OURS), pieces=lambda _: [], also=None, written=()
    )
    case = dataclasses.replace(case, ours=ours, peers=(), wall=True, expected=list)
    row, _ = measure.measure(case, THREE)
    assert "replay" not in cuda.log and "event" not in cuda.log
    assert row.captured is None and row.replayed == []
    at = len(cuda.log) - 1 - cuda.log[::-1].index(OURS)
    assert cuda.log[at - 2 : at + 2] == ["flush", "synchronize", OURS, "synchronize"]


def test_cuda_kernel_that_only_reads_has_a_sum_for_its_roof(cuda, monkeypatch):
    case = next(case for case in small_cases() if case.kernel == "dot_and_norms")
    monkeypatch.setattr(measure, "read_roof", lambda: (lambda: None, 1000))
    row, _ = measure.measure(dataclasses.replace(case, wall=True), THREE)
    assert measure.READ in row.times and COPY not in row.times
    assert row.roof == 1000 / row.times[measure.READ].median


def test_cuda_calls_that_are_small_are_replayed_too_and_the_faster_counts(cuda):
    case = next(case for case in small_cases() if case.kernel == "pack")
    # The fake's replay computes nothing: the answer is the one that warming up has left.
    case.ours.call()
    ours, *peers = (dataclasses.replace(each, written=()) for each in (case.ours, *case.peers))
    row, _ = measure.measure(dataclasses.replace(case, ours=ours, peers=peers), THREE)
    names = {OURS, *row.peers}
    assert row.captured is True
    assert set(row.times) == {*names, COPY, EMPTY}
    assert set(row.hosts) == {*names, COPY, EMPTY}
    # Calls that note nothing last 0 ms here and replays 1 ms, the empty launch 1 ms both ways.
    assert row.replayed == []
    assert row.times[EMPTY].median == 1e-3
    replays = cuda.log.count("replay")
    kept_out = sum(not peer.capturable for peer in case.peers)
    # One to check it (not the empty one), 3 and 20 for the host's time, then the rounds.
    assert replays == (len(names) - kept_out) * (1 + 23 + 3) + 23 + 3


def test_cuda_replay_with_a_wrong_answer_raises(cuda):
    case = next(case for case in small_cases() if case.kernel == "sum_n")
    with pytest.raises(measure.WrongAnswer, match="ours: an element is nan"):
        measure.measure(case, THREE)


def test_cuda_kernel_that_cannot_be_captured_is_still_timed(cuda, monkeypatch):
    case = next(case for case in small_cases() if case.kernel == "sum_n")

    def refuse(call: timing.Call) -> None:
        if call is not timing.empty_launch:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (lambda: None), None

    monkeypatch.setattr(measure, "captured", refuse)
    row, _ = measure.measure(case, THREE)
    assert row.captured is False
    assert row.notes[OURS].startswith("no graph: operation not permitted")


def test_cuda_capture_that_fails_leaves_the_callers_stream_current(cuda):
    caller = cuda.Stream()
    cuda.current_stream = lambda: caller
    currents = []
    cuda.set_stream = currents.append

    @contextmanager
    def failing(graph):
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    cuda.graph = failing
    with pytest.raises(RuntimeError, match="previous error during capture"):
        timing.captured(lambda: None)
    assert currents == [caller]


def test_order_of_calls_differs_from_round_to_round(monkeypatch):
    orders: list[list[str]] = []
    one_round = lambda order: orders.append(order) or dict.fromkeys(order, 1.0)  # noqa: E731
    monkeypatch.setattr(timing, "_cpu_rounds", lambda calls: one_round)
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    limits = Limits(0.0, 11, 11)
    samples = timing.time_together(dict.fromkeys("abc", lambda: None), {}, limits)
    assert [sorted(order) for order in orders] == [["a", "b", "c"]] * 11
    # The fewest rounds on a GPU are enough for each to come first, and after each other.
    assert {order[0] for order in orders} == {"a", "b", "c"}
    pairs = {pair for order in orders for pair in itertools.pairwise(order)}
    assert pairs == {*itertools.permutations("abc", 2)}
    assert samples == {"a": [1.0] * 11, "b": [1.0] * 11, "c": [1.0] * 11}


def test_number_of_rounds_is_within_its_limits(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    calls = {"a": lambda: None}
    assert len(timing.time_together(calls, {}, Limits(0.0, 4, 9))["a"]) == 4
    assert len(timing.time_together(calls, {}, Limits(60.0, 4, 9))["a"]) == 9
