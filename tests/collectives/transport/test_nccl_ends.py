"""The NCCL transport's end, by whoever notices first that there is no other way, and only once.

Over fakes that keep NCCL's rules (fake_nccl.py): no GPU needed.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError, Work
from collectives.call import Call
from collectives.recorder import GroupRecord
from collectives.transport import Message
from collectives.transport.nccl import cupy_backend, watcher
from collectives.transport.nccl import transport as nccl
from collectives.work import CallQueue
from tests.fakes.fake_cuda import FakeEvent
from tests.fakes.fake_nccl import FakeNccl, NcclError
from tests.fakes.nccl_machine import Machine, all_good, full, make_machine, swap, told

TIMEOUT = 0.3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield from make_machine(monkeypatch, FakeNccl())


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


def test_no_event_is_asked_while_a_step_is_neither_late_nor_its_peer_gone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would end the capture of a CUDA graph in any thread."""
    asked: list[threading.Thread] = []
    query = FakeEvent.query

    def noted(event: FakeEvent) -> bool:
        asked.append(threading.current_thread())
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", noted)

    def work(transport: nccl.NcclTransport) -> None:
        swap(transport, full(3, 1.0), full(3, 0.0), "step 0")
        time.sleep(0.5)
        assert not any(thread.name.startswith("nccl") for thread in asked)

    all_good(machine.run(2, work))


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


def test_an_error_of_cudas_does_not_end_the_watch(machine: Machine) -> None:
    """It reaches the host's thread, too; what is behind it still has to be ended."""

    class Failed:
        def query(self) -> bool:
            asked.append(0)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked: list[int] = []

    def work(transport: nccl.NcclTransport) -> None:
        watched = transport._watcher
        watched.items.append(watcher.Posted((0,), "a step", 0.0, event=Failed()))
        threading.Thread(target=watched._run, daemon=True).start()
        while len(asked) < 2:
            time.sleep(0.01)
        watched.items.clear()

    all_good(machine.run(1, work))


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


def test_an_end_without_threads_is_no_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on none can be started when the interpreter ends."""

    def fails(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    kept: list[nccl.NcclTransport] = []
    all_good(machine.run(1, kept.append, close=False))
    monkeypatch.setattr(cupy_backend, "run_beside", fails)
    kept[0]._end()
    assert not machine.nccl.destroyed


def test_a_communicator_that_comes_while_all_are_aborted_is_aborted_once(
    machine: Machine,
) -> None:
    """cupy takes no care of that: the second abort would use what the first has freed."""

    def work(transport: nccl.NcclTransport) -> int:
        backend = transport._backend
        aborted: list[threading.Thread] = []

        class Late:
            def abort(self) -> None:
                aborted.append(threading.current_thread())

        class Made(list):  # type: ignore[type-arg]
            """Where the abort begins just after the communicator was added."""

            def append(self, made: object) -> None:
                super().append(made)
                if isinstance(made, Late):
                    abort.start()
                    # It waits for the lock that is held here; without the lock it ends.
                    abort.join(0.1)

        abort = threading.Thread(target=backend.abort)
        backend._made = Made(backend._made)
        backend._make(Late, 10.0)
        # Now every abort has begun, in a thread of its own if not in make.
        abort.join(20.0)
        for thread in threading.enumerate():
            if thread.name == "nccl-abort":
                thread.join(20.0)
        return len(aborted)

    assert all_good(machine.run(1, work)) == [1]


@pytest.mark.parametrize("end", ["abort", "close"])
def test_no_communicator_is_asked_for_errors_once_its_end_has_begun(
    machine: Machine, end: str
) -> None:
    """NCCL frees it then, in another thread than the one that asks."""

    def work(transport: nccl.NcclTransport) -> list[str]:
        backend = transport._backend
        happened: list[str] = []
        asked, free = threading.Event(), threading.Event()
        real = backend._made[0]

        class Slow:
            def check_async_error(self) -> None:
                asked.set()
                free.wait(0.3)
                happened.append("answered")

            def end(self) -> None:
                happened.append("freed")
                getattr(real, "abort" if end == "abort" else "destroy")()

            abort = destroy = end

        backend._made[0] = Slow()
        asking = threading.Thread(target=backend.check)
        asking.start()
        assert asked.wait(20.0)
        getattr(backend, end)()
        asking.join(20.0)
        backend.check()
        return happened

    assert all_good(machine.run(1, work)) == [["answered", "freed"]]


def test_what_fails_after_a_late_step_was_ended_names_the_step(machine: Machine) -> None:
    """NCCL says then no more than that its argument, the communicator, is invalid."""

    def work(transport: nccl.NcclTransport) -> str:
        def post() -> None:
            transport._watcher.late(watcher.Posted((1,), "step 7", 3.0))
            raise NcclError(4)

        with pytest.raises(CollectiveTimeoutError) as caught:
            transport._start(post, [full(3, 1.0)], watcher.Posted((1,), "step 8", 10.0))
        return str(caught.value)

    assert "no answer from rank 1 in step 7" in all_good(machine.run(2, work))[0]


def test_a_destroy_that_fails_leaves_nothing_else_open(machine: Machine) -> None:
    """Neither the other communicators nor the host's connections."""

    def work(transport: nccl.NcclTransport) -> list[str]:
        ended: list[str] = []

        def fail() -> None:
            raise NcclError(2)

        backend = transport._backend
        backend._whole.destroy = lambda: ended.append("whole")
        another = machine.nccl.get_unique_id()
        part = backend._make(lambda: machine.nccl.NcclCommunicator(1, another, 0), 10.0)
        part.destroy = fail
        transport._host.close = lambda: ended.append("host")  # type: ignore[method-assign]
        with pytest.raises(TransportError, match=r"NCCL failed in close: NCCL_ERROR_SYSTEM_ERROR"):
            transport.close()
        return ended

    assert all_good(machine.run(1, work, close=False)) == [["whole", "host"]]


def test_communication_goes_before_the_callers_own_work(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> int:
        return transport._backend.stream(torch.device("cuda", 0)).stream.priority

    assert all_good(machine.run(2, work)) == [-1, -1]
