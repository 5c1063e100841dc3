"""Requests whose work is captured: all ranks capture and launch alike, whatever each of them does.

The ranks are threads, and a transport of theirs captures by keeping the work, which a launch does
again: what is launched with other ranks' earlier captures is found by its number. What real graphs
do is in tests/collectives/transport/test_nccl_graphs.py and tests/processes/test_nccl.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import Average, CollectiveMismatchError, Group, Max, Sum, calls
from collectives.execution import replay
from collectives.execution.replay import CAPTURED, NEW, SEEN, enabled
from collectives.recorder import span
from collectives.reducers import Reducer, SumReducer
from collectives.transport import ThreadTransport, ThreadWorld
from collectives.tree_order import in_order
from tests.collectives.consistency.ranks import WithoutSharedMemory, run_over

NUMEL = 1000
# Of 30 turns: in the calm behind a storm, and in one.
JOINED = 27


class Capturing(ThreadTransport):
    """Says that it captures, and keeps the work.

    Attributes:
        done: What came of each start: "host", "capture" or "launch", with the capture's number.
        fails: Whether captures fail.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.done: list[tuple[str, int]] = []
        self.fails = False
        self.captured = 0

    def captures(self, device: torch.device) -> bool:
        return True

    def capture(self, work: Callable[[], Any]) -> Callable[[str, float], None]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        number = self.captured
        self.done.append(("capture", number))
        written: list[torch.Tensor] = work.args[1].tensors  # type: ignore[attr-defined]

        def launch(step: str, timeout: float) -> None:
            self.done.append(("launch", number))
            versions = [each._version for each in written]
            work()
            # A graph's work is not seen by autograd.
            torch._C._autograd._unsafe_set_version_counter(tuple(written), tuple(versions))

        return launch


class CapturingByMessages(Capturing, WithoutSharedMemory):
    """Whose ranks negotiate by messages."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call goes through the memory that ranks on CPUs share."""
    monkeypatch.setattr(calls, "plan_host_all_reduce", lambda runner, call: None)


def run(
    size: int, job: Callable[[Group, Capturing], Any], kind: type[Capturing] = Capturing
) -> list[Capturing]:
    world = ThreadWorld(size)
    ranks = [kind(world, rank) for rank in range(size)]

    run_over(ranks, lambda group: job(group, group.transport))
    return ranks


@pytest.mark.parametrize(
    "op", [Sum, Average, Max, Adasum, in_order(Sum, "tree"), in_order(Average, "tree")], ids=str
)
def test_work_is_put_twice_by_the_host_and_then_launched(op: Reducer) -> None:
    def job(group: Group, transport: Capturing) -> None:
        buffer = torch.empty(NUMEL)
        request = group.all_reduce_init(buffer, op, algorithm="rd")
        for turn in range(5):
            mine = [torch.randn(NUMEL, generator=_seed(turn, rank)) for rank in range(group.size)]
            buffer.copy_(mine[group.rank])
            request.start()
            assert request.wait() is buffer
            wanted = group.all_reduce(mine[group.rank].clone(), op, algorithm="rd")
            assert torch.equal(buffer, wanted)

    for transport in run(3, job):
        assert transport.done == [("capture", 1)] + 3 * [("launch", 1)]


@pytest.mark.parametrize("kind", [Capturing, CapturingByMessages])
def test_ranks_capture_and_launch_together_whatever_each_does(kind: type[Capturing]) -> None:
    """Other buffers, direct calls, joined ranks and failing captures, as each rank draws them.

    Every launch is of graphs that all ranks captured in the same start, and every result is right.
    """
    size, turns = 3, 120
    stages: list[list[tuple[str, int]]] = [[] for _ in range(size)]

    def job(group: Group, transport: Capturing) -> None:
        own, rank = random.Random(group.rank), group.rank
        buffers = [torch.empty(NUMEL) for _ in range(2)]
        request = group.all_reduce_init(buffers[0], Sum, algorithm="rd", negotiate=False)
        at = 0
        for turn in range(turns):
            # Calm between the storms, so that there are launches.
            stormy = turn % 20 < 8
            # A request whose capture has failed stays without: at the end alone.
            transport.fails = turn > 100 and rank == 1
            mine = float(rank + turn)
            before = len(transport.done)
            if turn % 30 == JOINED and rank == 2:
                group.join()
                stages[rank].append(("joined", turn))
                continue
            if stormy and own.random() < 0.1:
                found = group.all_reduce(torch.full((NUMEL,), mine), Sum, algorithm="rd")
            else:
                if stormy and own.random() < 0.2:
                    at = 1 - at
                    buffers[at].fill_(mine)
                    request.start(buffers[at])
                else:
                    buffers[at].fill_(mine)
                    request.start()
                found = request.wait()
            ranks = range(2) if turn % 30 == JOINED else range(size)
            assert torch.equal(found, torch.full((NUMEL,), float(sum(r + turn for r in ranks))))
            launched = [number for what, number in transport.done[before:] if what == "launch"]
            stages[rank].append(("launch" if launched else "host", turn))
            if turn % 30 == JOINED:
                group.join()

    found = run(size, job, kind)
    for turns_of in zip(*stages, strict=True):
        # A rank that has joined takes part on the host's way.
        kinds = {"host" if what == "joined" else what for what, _ in turns_of}
        assert len(kinds) == 1, turns_of
    launches = sum(what == "launch" for what, _ in stages[0])
    assert launches > turns // 3
    assert all(transport.captured > 3 for transport in found)


def test_a_launch_is_a_new_version_and_a_range_of_timelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that autograd finds that a tensor which it has saved was reduced."""
    names: list[str] = []

    def noted(name: Callable[[], str], *, cuda: bool) -> AbstractContextManager[object]:
        names.append(name())
        return span(name, cuda=cuda)

    monkeypatch.setattr(replay, "span", noted)

    def job(group: Group, transport: Capturing) -> None:
        buffer = torch.ones(NUMEL)
        request = group.all_reduce_init(buffer, Sum, algorithm="rd", name="a bucket")
        for _ in range(5):
            before = buffer._version
            request.start()
            request.wait()
            assert buffer._version > before

    run(2, job)
    assert names == ["all_reduce 'a bucket': Sum, a CUDA graph, 4000 B"] * 2 * 3


def test_a_start_waits_but_a_moment_for_ranks_that_wait_for_its_caller() -> None:
    """It is captured at a later start, if ever; nothing of the order of calls is new."""

    def job(group: Group, transport: Capturing) -> None:
        request = group.all_reduce_init(torch.ones(NUMEL), Sum, algorithm="rd")
        for turn in range(3):
            if group.rank == 1:
                assert told[turn].wait(5.0)
            request.start()
            if group.rank == 0:
                told[turn].set()
            request.wait()

    told = [threading.Event() for _ in range(3)]
    first, _ = run(2, job)
    assert first.done == []


def test_a_start_says_how_far_the_rank_is() -> None:
    """And a rank that is not as far keeps the others back, until they no longer ask."""

    def job(group: Group, transport: Capturing) -> None:
        buffer = torch.ones(NUMEL)
        request = group.all_reduce_init(buffer, Sum, algorithm="rd", negotiate=False)
        if group.rank == 0:
            for _ in range(40):
                group.all_reduce(torch.ones(NUMEL), Sum, algorithm="rd")
            return
        stages = []
        for _ in range(40):
            request.start()
            assert request._call.replay is not None
            stages.append(request._call.stage)
            request.wait()
        assert stages == [NEW] + 32 * [SEEN] + 7 * [NEW]

    assert [transport.done for transport in run(2, job)] == [[], []]


def test_a_capture_that_fails_is_a_warning_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def job(group: Group, transport: Capturing) -> None:
        transport.fails = group.rank == 1
        buffer = torch.ones(NUMEL)
        request = group.all_reduce_init(buffer, Average, algorithm="rd")
        for _ in range(15):
            request.start()
            assert torch.equal(request.wait(), torch.ones(NUMEL))

    first, second = run(2, job)
    # It captures, and never launches what the other one has not.
    assert {what for what, _ in first.done} == {"capture"}
    assert second.done == []
    (record,) = [each for each in caplog.records if "was not captured" in each.message]
    assert "not permitted" in record.message


def test_what_differs_is_an_error_as_before() -> None:
    """Also where one rank is ready to launch, and the group goes on."""

    def job(group: Group, transport: Capturing) -> None:
        buffer = torch.ones(NUMEL)
        request = group.all_reduce_init(buffer, Sum, algorithm="rd", negotiate=False)
        for _ in range(4):
            request.start()
            request.wait()
        assert request._call.replay is not None
        assert request._call.replay.stage == CAPTURED + 1  # type: ignore[attr-defined]

        def differ() -> None:
            if group.rank == 0:
                request.start()
                request.wait()
            else:
                group.all_reduce(buffer, Max, algorithm="rd")

        with pytest.raises(CollectiveMismatchError, match="op"):
            differ()
        buffer.fill_(1.0)
        request.start()
        assert torch.equal(request.wait(), torch.full((NUMEL,), 2.0))

    run(2, job)


class _Undeclared(SumReducer):
    """An operator of a user's, which may do anything beside its sum."""


@pytest.mark.parametrize("algorithm", ["rd", "pscpu"])
def test_what_may_not_be_captured_is_not(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that does not say it may; work on the host; where the environment says so."""

    def job(group: Group, transport: Capturing) -> None:
        op = _Undeclared() if algorithm == "rd" else Sum
        observed = Adasum.observed()
        for each in (op, observed) if algorithm == "rd" else (op,):
            request = group.all_reduce_init(torch.ones(NUMEL), each, algorithm=algorithm)
            assert request._call.replay is None
        chosen = group.all_reduce_init(torch.ones(NUMEL), Sum, algorithm="rd")
        assert chosen._call.replay is not None
        scattered = group.reduce_scatter_init(torch.ones(NUMEL), Sum)
        assert scattered._call.replay is None

    run(2, job)
    monkeypatch.setenv("ADASUM_CUDA_GRAPHS", "0")
    enabled.cache_clear()
    try:

        def off(group: Group, transport: Capturing) -> None:
            request = group.all_reduce_init(torch.ones(NUMEL), Sum, algorithm="rd")
            assert request._call.replay is None

        run(2, off)
        monkeypatch.setenv("ADASUM_CUDA_GRAPHS", "yes")
        enabled.cache_clear()
        with pytest.raises(ValueError, match="ADASUM_CUDA_GRAPHS must be 0 or 1, got 'yes'"):
            enabled()
    finally:
        monkeypatch.undo()
        enabled.cache_clear()


def _seed(turn: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * turn + rank)
