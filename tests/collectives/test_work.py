"""What a Work tells those who do not wait for it, and which thread carries out its call."""

from __future__ import annotations

import sys
import threading

import pytest

from collectives import TransportError
from collectives.work import CallQueue
from tests.collectives.queues import Queue, done, hold


@pytest.fixture
def queue():
    queue = Queue()
    yield queue
    queue.close()


def test_callbacks_run_once_and_in_order_in_the_communication_thread(queue):
    gate, seen = hold(queue), []
    work = queue.later(lambda: 7)
    for number in range(3):
        work.add_done_callback(
            lambda n=number: seen.append((n, work.is_completed(), threading.current_thread().name))
        )
    assert seen == []
    gate.set()
    queue.call(lambda: None)
    assert seen == [(n, True, "collectives-0") for n in range(3)]
    work.add_done_callback(lambda: seen.append(threading.current_thread()))
    assert seen[3:] == [threading.current_thread()], "at once where the call has ended"


@pytest.mark.parametrize("leave", [lambda: 1 // 0, lambda: sys.exit("leaving")])
@pytest.mark.parametrize("hook", ["notes", "raises"])
def test_callback_that_raises_leaves_the_next_calls_running(queue, monkeypatch, leave, hook):
    said = []

    def excepthook(args):
        said.append(args.exc_type)
        if hook == "raises":
            raise SystemExit

    monkeypatch.setattr(threading, "excepthook", excepthook)
    gate, seen = hold(queue), []
    work = queue.later(lambda: 6)
    work.add_done_callback(leave)
    work.add_done_callback(lambda: seen.append(6))
    behind = queue.later(lambda: 7)
    gate.set()
    assert done(behind) == 7 and queue.call(lambda: 8) == 8 and seen == [6]
    assert said in ([ZeroDivisionError], [SystemExit])


def test_call_within_a_call_raises_instead_of_waiting_for_itself(queue, monkeypatch):
    """As in a signal's handler, or a callback."""
    for nested in (lambda: queue.call(lambda: 7), lambda: queue.later(lambda: 7).wait()):
        with pytest.raises(TransportError, match="inside a call of the same group"):
            queue.call(nested)
    # Without a wait it takes its turn.
    assert queue.call(lambda: queue.later(lambda: 8)).wait() == 8
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    gate = hold(queue)
    work = queue.later(lambda: None)
    work.add_done_callback(lambda: queue.call(lambda: 9))
    gate.set()
    assert queue.call(lambda: 10) == 10
    assert [args.exc_type for args in said] == [TransportError]


@pytest.mark.parametrize("begun", [False, True])
def test_thread_that_waits_for_the_last_call_carries_all_of_them_out(queue, monkeypatch, begun):
    monkeypatch.setattr(CallQueue, "_serve", lambda *_: None)
    ran = []
    works = [queue.begun(lambda: None, lambda: ran.append("begun"))] if begun else []
    for number in range(50):
        works.append(queue.later(lambda n=number: ran.append((n, threading.get_ident()))))
    works[-1].wait()
    assert ran == ["begun"] * begun + [(n, threading.get_ident()) for n in range(50)]
    assert all(work.has_ended() for work in works)


def test_wait_raises_where_the_communication_thread_has_ended(queue, monkeypatch):
    """Of a call that this thread cannot carry out; callbacks are told."""
    monkeypatch.setattr(CallQueue, "_serve", lambda *_: None)
    work, told = queue.later(lambda: 7), []
    work.add_done_callback(lambda: told.append(work.has_ended()))
    with pytest.raises(TransportError, match="thread ended"):
        work.wait()
    assert told == [True]
    queue._works.clear()
