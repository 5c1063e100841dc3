"""The NCCL transport's end, by whoever notices first that there is no other way, and only once.

Over fakes that keep NCCL's rules (fake_nccl.py): no GPU needed.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError, Work
from collectives.call import Call
from collectives.recorder import GroupRecord
from collectives.transport import Message
from collectives.transport.nccl import transport as nccl
from collectives.transport.nccl import watcher
from collectives.work import CallQueue
from tests.fakes.fake_cuda import full
from tests.fakes.nccl_machine import Machine, all_good, swap, told

TIMEOUT = 0.3


def said(
    machine: Machine, steps: Callable[[nccl.NcclTransport, Message], None]
) -> tuple[str, float]:
    """What rank 0 is told of its steps where the peer posts nothing after step 0, and when."""
    done = threading.Event()

    def work(transport: nccl.NcclTransport) -> tuple[str, float]:
        mine, got = full(3, 1.0), full(3, 0.0)
        swap(transport, mine, got, "step 0")
        machine.read(got)
        if transport.rank == 1:
            assert done.wait(60.0)
            return "", 0.0
        start = time.monotonic()
        try:
            steps(transport, Message(1, mine))
            return str(told(transport.check_streams)), time.monotonic() - start
        except CollectiveTimeoutError as error:
            return str(error), time.monotonic() - start
        finally:
            done.set()

    text, waited = all_good(machine.run(2, work))[0]
    return text, waited


@pytest.mark.parametrize("blocked", [False, True])
def test_a_step_is_late_whatever_the_host_does(machine: Machine, blocked: bool) -> None:
    """It goes on, or CUDA blocks it until the step ends: nobody else would end that."""

    def steps(transport: nccl.NcclTransport, message: Message) -> None:
        for step in (1, 2):
            transport.exchange([message], [], f"step {step}", TIMEOUT)
        if blocked:
            machine.cuda.current_stream().synchronize()

    text, waited = said(machine, steps)
    assert "got no answer from rank 1 in step 1 (stopped after 0.3 s)" in text
    assert TIMEOUT <= waited < TIMEOUT + 5.0


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_peer_that_is_gone_ends_the_wait_at_once(machine: Machine, leaves: int) -> None:
    """Not another rank, which may have been done before this one."""
    done = threading.Event()

    def work(transport: nccl.NcclTransport) -> str:
        if transport.rank == leaves:
            transport._host.close()
        if transport.rank > 0:
            assert done.wait(60.0)
            return ""
        try:
            transport.exchange([Message(1, full(3, 1.0))], [], "step 1", 1.0 if leaves == 2 else 60)
            start = time.monotonic()
            error = str(told(transport.check_streams))
            assert time.monotonic() - start < 20.0
            return error
        finally:
            done.set()

    text = all_good(machine.run(3, work))[0]
    cause = ": rank 1 has ended; its NCCL comm" if leaves == 1 else "(stopped after 1 s)"
    assert "rank 0 got no answer from rank 1 in step 1" in text and cause in text


def test_a_work_asks_what_became_of_its_collective(machine: Machine) -> None:
    """Also one that had ended on the host before; the call that comes next is told as well."""
    done = threading.Event()

    def work(transport: nccl.NcclTransport) -> None:
        if transport.rank == 1:
            assert done.wait(60.0)
            return
        record = GroupRecord([0, 1], 0)
        queue = CallQueue(transport, 20.0, record)
        message = Message(1, full(3, 1.0))

        def call() -> None:
            transport.exchange([message], [], "step 1", TIMEOUT)

        flight: Work[None] = Work(queue, Call("flight"), call)
        flight._run()
        flight._streams = [machine.cuda.current_stream()]
        flight._events = [machine.cuda.current_stream().record_event()]
        assert flight.has_ended() and not flight.is_completed()
        told(transport.check_streams)
        assert flight.is_completed()
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="from rank 1 in step 1"):
                flight.wait()
        # Where the error is raised first the flight record is written, with what it was.
        assert record.error.startswith("CollectiveTimeoutError: rank 0 got no answer from rank 1")
        with pytest.raises(CollectiveTimeoutError, match="from rank 1 in step 1"):
            queue.run(Call("barrier"), lambda: None)
        with pytest.raises(TransportError, match=r"barrier: this group is unusable .* step 1"):
            queue.run(Call("barrier"), lambda: None)
        queue.close()
        done.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", machine.cuda.current_stream)
        all_good(machine.run(2, work))


@pytest.mark.parametrize("told_before", [False, True])
def test_close_raises_what_ended_the_steps_unless_somebody_was_told(
    machine: Machine, told_before: bool
) -> None:
    done = threading.Event()

    def work(transport: nccl.NcclTransport) -> None:
        if transport.rank == 1:
            assert done.wait(60.0)
            return
        transport.exchange([Message(1, full(3, 1.0))], [], "step 1", TIMEOUT)
        if told_before:
            told(transport.check_streams)
            transport.close()
        else:
            with pytest.raises(CollectiveTimeoutError, match="from rank 1 in step 1"):
                transport.close()
        done.set()

    all_good(machine.run(2, work))


def test_the_host_does_not_run_far_ahead(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch waits without a limit where too many are queued behind a rank that is gone."""
    monkeypatch.setattr(watcher, "MAX_PENDING", 4)
    posted = []

    def steps(transport: nccl.NcclTransport, message: Message) -> None:
        for step in range(1, 100):
            posted.append(step)
            transport.exchange([message], [], f"step {step}", TIMEOUT)

    assert "got no answer from rank 1 in step 1 " in said(machine, steps)[0]
    assert posted == [1, 2, 3, 4, 5]


def test_a_rank_that_gives_up_tells_the_others_and_ends_its_communicators(machine: Machine) -> None:
    """As a group does when a call is interrupted or fails in any other way than NCCL's.

    Its closing, at the end of the run, then says nothing new.
    """

    def work(transport: nccl.NcclTransport) -> list[str]:
        told: list[str] = []
        transport._host.abort = told.append  # type: ignore[attr-defined]
        swap(transport, full(3, 1.0), full(3, 0.0), "step 0")
        transport.abort("it was interrupted")
        with pytest.raises(TransportError, match="it was interrupted"):
            transport.check_streams()
        with pytest.raises(TransportError, match=r"step 1: .* since it was interrupted"):
            transport.exchange([], [Message(1 - transport.rank, full(3, 0.0))], "step 1", 10.0)
        return told

    assert all_good(machine.run(2, work)) == [["it was interrupted"]] * 2
    assert machine.nccl.aborted == {0, 1}


def test_nothing_is_called_or_collected_in_a_forked_child(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cupy destroys what is collected: in a child that ends as a program does, that never ends."""
    kept: list[nccl.NcclTransport] = []
    all_good(machine.run(1, kept.append, close=False))
    monkeypatch.setattr(nccl, "os", SimpleNamespace(getpid=lambda: -1))
    kept.pop().close()
    gc.collect()
    assert not machine.nccl.destroyed and machine.nccl.broken == []


def test_communication_goes_before_the_callers_own_work(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> int:
        return transport._backend.stream(torch.device("cuda", 0)).stream.priority

    assert all_good(machine.run(2, work)) == [-1, -1]


def test_close_ends_the_thread(machine: Machine) -> None:
    """A query of its own while the interpreter ends would abort the process."""

    def work(transport: nccl.NcclTransport) -> tuple[bool, bool]:
        swap(transport, full(3, 1.0), full(3, 0.0), "step 0")
        thread = transport._watcher._thread
        assert thread is not None
        alive = thread.is_alive()
        transport.close()
        return alive, thread.is_alive()

    assert all_good(machine.run(2, work)) == [(True, False)] * 2
