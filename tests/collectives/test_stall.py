"""A rank that waits for long says for whom, on every transport, and goes on waiting."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import collectives
from collectives import Group
from collectives.stall import Stall, warning_seconds
from collectives.transport import ThreadWorld
from collectives.transport.nccl.watcher import Posted, Watcher
from tests.collectives.consistency.ranks import WAYS, run

EVERY = 0.1
# Some warnings' time, and no timeout.
LATE, TIMEOUT = 0.6, 30.0
SAID = (
    r"^rank 0 has waited 0\.\d+ s for rank 1 in .*(step|negotiation).* of all_reduce 'late' "
    r"\(call 0\).*: an error after 30 s$"
)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets ADASUM_STALL_WARNING_SECONDS."""

    def change(text: str) -> None:
        monkeypatch.setenv("ADASUM_STALL_WARNING_SECONDS", text)
        warning_seconds.cache_clear()

    yield change
    warning_seconds.cache_clear()


def come_late(group: Group) -> float:
    """Rank 1 comes late to a call, which is carried out."""
    if group.rank == 1:
        time.sleep(LATE)
    return float(group.all_reduce(torch.ones(1), name="late"))


@pytest.mark.parametrize("way", WAYS)
def test_long_wait_is_warned_of_again_and_again_and_goes_on(
    way: str, seconds: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    seconds(str(EVERY))
    start = time.monotonic()
    assert run(way, 2, come_late, TIMEOUT) == [2.0, 2.0]
    waited = time.monotonic() - start
    said = [each for each in caplog.records if each.name == "collectives.stall"]
    assert 3 <= len(said) <= waited / EVERY
    for each in said:
        assert each.levelno == logging.WARNING
        assert re.match(SAID, each.getMessage()), each.getMessage()


@pytest.mark.parametrize("text", ["0", "", "10"])
def test_wait_of_less_than_the_setting_is_not_warned_of(
    text: str, seconds: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    seconds(text)
    run("shm", 2, come_late, TIMEOUT)
    assert not caplog.records
    assert warning_seconds() == {"0": float("inf"), "": 60.0, "10": 10.0}[text]


class Event:
    """An event of a stream that has come, or has not."""

    def __init__(self) -> None:
        self.come = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.come


def test_long_wait_over_nccl_is_warned_of_unless_it_has_come(
    seconds: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    seconds("10")
    backend = cast(Any, SimpleNamespace(check=lambda: None))
    watcher = Watcher(ThreadWorld(2).transport(0), backend, lambda: None)
    events = [Event(), Event()]
    for event, since, peers in zip(events, (15.0, 12.0), ((1,), ()), strict=True):
        begun = time.monotonic() - since
        posted = Posted(peers, "step 1 of all_reduce", 300.0, event=event, since=begun)
        watcher.items.append(posted)
    watcher.watch()
    watcher.watch()
    (said,) = caplog.messages
    assert re.match(r"rank 0 has waited 15 s for rank 1 in step 1 of all_reduce: an error", said)
    # An event is asked for once a warning is due, and not before.
    assert (events[0].asked, events[1].asked) == (1, 0)
    caplog.clear()
    events[0].come = True
    watcher.settle(1)
    watcher.watch()
    # The second one's time begins when the first has come.
    assert not caplog.messages


def test_thread_that_watches_may_query_events_during_any_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own mode is relaxed before it queries an event, and in its own thread."""
    asked: list[tuple[str, int]] = []
    name = "cuThreadExchangeStreamCaptureMode"

    def exchange(mode: Any) -> int:
        asked.append((threading.current_thread().name, mode._obj.value))
        return 0

    drivers = {"libcuda.so.1": SimpleNamespace(**{name: exchange})}
    monkeypatch.setattr("collectives.transport.nccl.watcher.ctypes.CDLL", drivers.__getitem__)
    backend = cast(Any, SimpleNamespace(check=lambda: None))
    watcher = Watcher(ThreadWorld(2).transport(0), backend, lambda: None)
    watcher.add(Posted((1,), "step 1 of all_reduce", 300.0, event=Event()))
    assert watcher._thread is not None
    watcher.stop()
    assert asked == [("nccl-watch-0", 2)]


def test_wait_that_has_ended_is_kept_by_no_thread() -> None:
    """The last reference to a process group is dropped where the interpreter cannot stop it."""

    class Peer:
        pass

    peer = Peer()
    with Stall(0, "step 0", TIMEOUT * 1e3, partial(str, peer)).within():
        # The thread has looked, and sleeps.
        time.sleep(0.2)
    ended = weakref.ref(peer)
    del peer
    assert ended() is None


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e300"])
def test_setting_that_is_no_number_of_seconds_is_refused_before_anybody_waits(
    text: str, seconds: Callable[[str], None]
) -> None:
    seconds(text)
    with pytest.raises(ValueError, match=r"ADASUM_STALL_WARNING_SECONDS must be .*, got"):
        collectives.run_threads(1, lambda group: None)
