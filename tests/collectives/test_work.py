"""What a Work tells those who do not wait for it."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from threadpoolctl import threadpool_info

import collectives
from collectives import TransportError
from collectives.work import Work
from collectives.worker import Worker
from tests.collectives.interrupts import Interrupt, run_interrupted


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    worker.close(10.0)


def test_callbacks_run_once_and_in_order_in_the_communication_thread(worker):
    gate, seen = threading.Event(), []
    work = worker.submit(lambda: gate.wait(10.0))
    for number in range(3):
        work.add_done_callback(
            lambda n=number: seen.append((n, work.is_completed(), threading.current_thread().name))
        )
    assert seen == []
    gate.set()
    worker.call(lambda: None)
    assert seen == [(n, True, "test") for n in range(3)]


def test_callback_added_after_the_end_runs_at_once():
    work = Work()
    work.run(lambda: 7)
    seen = []
    work.add_done_callback(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]


def test_callbacks_of_a_failed_call_run(worker):
    def fail() -> None:
        raise RuntimeError("broken")

    seen = threading.Event()
    work = worker.submit(fail)
    work.add_done_callback(seen.set)
    assert seen.wait(10.0)
    with pytest.raises(RuntimeError, match="broken"):
        work.wait()


def test_communication_thread_starts_no_more_threads_than_its_caller(worker):
    def openmp_threads():
        # torch's: another package's OpenMP, where one is loaded, has settings of its own.
        return {
            each["num_threads"]
            for each in threadpool_info()
            if each["user_api"] == "openmp" and "torch" in each["filepath"]
        }

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert worker.submit(openmp_threads).wait() == {1}
    finally:
        torch.set_num_threads(before)


def test_callback_that_raises_leaves_the_communication_thread_running(worker, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    gate = threading.Event()
    work = worker.submit(lambda: gate.wait(10.0))
    work.add_done_callback(lambda: 1 // 0)
    behind = worker.submit(lambda: 7)
    gate.set()
    assert done(behind) == 7
    assert [args.exc_type for args in said] == [ZeroDivisionError]


def test_callback_that_leaves_the_thread_leaves_the_next_calls_running(worker, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    gate = threading.Event()
    work = worker.submit(lambda: gate.wait(10.0))
    work.add_done_callback(lambda: sys.exit("leaving"))
    behind = worker.submit(lambda: 7)
    gate.set()
    assert done(behind) == 7
    assert worker.call(lambda: 8) == 8
    assert [args.exc_type for args in said] == [SystemExit]


def test_submit_without_a_thread_to_be_had_raises_and_queues_nothing(worker, monkeypatch):
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.submit(lambda: 7)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.begin(lambda: None, lambda: 7)
        assert worker.call(lambda: 8) == 8
    assert done(worker.submit(lambda: 9)) == 9


def test_begun_call_ends_without_a_wait(worker):
    begun = []
    work = worker.begin(lambda: begun.append(threading.current_thread()), lambda: 7)
    assert done(work) == 7
    assert begun == [threading.current_thread()]


def test_begun_call_that_fails_at_once_leaves_nothing_behind(worker):
    def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        worker.begin(fail, lambda: 7)
    assert worker.begin(lambda: None, lambda: 8) is not None
    assert worker.call(lambda: 8) == 8


def test_calls_behind_a_begun_one_run_after_it(worker):
    order, gate = [], threading.Event()

    def rest() -> None:
        assert gate.wait(10.0)
        order.append("rest")

    first = worker.begin(lambda: order.append("first"), rest)
    second = worker.submit(lambda: order.append("second"))
    assert worker.begin(lambda: order.append("never"), lambda: None) is None
    gate.set()
    second.wait()
    first.wait()
    assert order == ["first", "rest", "second"]


def test_call_within_a_call_raises_instead_of_waiting_for_itself(worker):
    """As in a signal's handler, or a callback."""
    with pytest.raises(TransportError, match="inside a call of the same group"):
        worker.call(lambda: worker.call(lambda: 7))
    with pytest.raises(TransportError, match="inside a call of the same group"):
        worker.call(lambda: worker.submit(lambda: 7).wait())
    # Without a wait it takes its turn.
    assert worker.call(lambda: worker.submit(lambda: 8)).wait() == 8
    said = []
    work = worker.submit(lambda: time.sleep(0.05))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", said.append)
        work.add_done_callback(lambda: worker.call(lambda: 9))
        assert worker.call(lambda: 10) == 10
    assert [args.exc_type for args in said] == [TransportError]


def test_hook_of_threads_that_raises_leaves_the_communication_thread_running(worker, monkeypatch):
    def leave(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", leave)
    work = worker.submit(lambda: time.sleep(0.05))
    work.add_done_callback(lambda: 1 // 0)
    assert done(worker.submit(lambda: 7)) == 7


def test_callbacks_run_where_the_communication_thread_ends(worker, monkeypatch):
    """Who has only a callback is told, too, whatever ends it."""
    gate = threading.Event()

    def leave(*_: object) -> int:
        assert gate.wait(10.0)
        raise SystemExit

    monkeypatch.setattr(Worker, "_serve", leave)
    monkeypatch.setattr(collectives.worker, "report_error", leave)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    works, told = [worker.submit(lambda: 7) for _ in range(3)], []
    for number, work in enumerate(works):
        work.add_done_callback(lambda n=number: told.append(n))
    gate.set()
    for work in works:
        with pytest.raises(TransportError, match="thread ended"):
            work.wait()
    worker._thread.join(10.0)
    assert told == [0, 1, 2]


def test_wait_raises_whatever_the_call_raised(worker):
    def leave() -> None:
        raise SystemExit("leaving")

    work = worker.submit(leave)
    behind = worker.submit(lambda: 7)
    assert done(behind) == 7
    with pytest.raises(SystemExit, match="leaving"):
        work.wait()


def test_wait_raises_where_the_communication_thread_has_ended(worker, monkeypatch):
    monkeypatch.setattr(Worker, "_loop", lambda *_: None)
    with pytest.raises(TransportError, match="thread ended"):
        worker.submit(lambda: 7).wait()


def test_interrupt_of_a_look_for_the_thread_leaves_it_alive(worker):
    """After one, threading.Thread.is_alive takes a thread that runs for one that has ended."""
    done(worker.submit(lambda: 7))
    for at in range(run_interrupted(worker.is_alive, -1)):
        with pytest.raises(Interrupt):
            run_interrupted(worker.is_alive, at)
    assert worker.is_alive()


def test_calls_after_a_pause_wake_the_thread(worker, monkeypatch):
    """It has stopped looking for them by itself."""
    monkeypatch.setattr(collectives.worker, "_MAX_POLLS", 1)
    for number in range(3):
        assert done(worker.begin(lambda: None, lambda n=number: n)) == number
        time.sleep(0.05)
        assert done(worker.submit(lambda n=number: n)) == number
        time.sleep(0.05)


def test_call_during_shut_down_raises():
    worker = Worker("test")
    worker.close(10.0)
    with pytest.raises(TransportError, match="shut down"):
        worker.submit(lambda: 7)


def done(work):
    """What it returns, within some seconds."""
    finished = threading.Event()
    work.add_done_callback(finished.set)
    assert finished.wait(10.0)
    return work.wait()
