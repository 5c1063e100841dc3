"""Ranks that may open few files: the limit is raised, or a warning or an error names it."""

from __future__ import annotations

import gc
import logging
import os
import sys

import pytest
import torch

import collectives
from collectives import TransportError
from collectives.bootstrap.transport_selection import require_room
from collectives.transport import descriptors
from tests.processes.harness import run_ranks

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc/self/fd")
SIZE = 3
# What gloo alone needs, as it is counted; it takes some less.
ROOM = descriptors.SPARE + SIZE + 8


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def sockets() -> int:
    """How many sockets this process has."""
    gc.collect()
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(n) and os.readlink(n).startswith("socket:") for n in names)


def start(transport: str) -> list[object]:
    """What came of a group: a sum, who is reached, and what was logged; or the error."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.getMessage()}"
    )
    logger = logging.getLogger("collectives")
    logger.addHandler(handler)
    try:
        group = collectives.init(transport=transport, timeout=30.0)
    except TransportError as error:
        return [str(error)]
    finally:
        logger.removeHandler(handler)
    value = group.all_reduce(torch.tensor([1.0])).item()
    reached = sorted(getattr(group.transport, "connected_peers", ()))
    collectives.shutdown()
    return [value, reached, [text for text in said if text.startswith("WARNING")]]


def limited(rank: int) -> list[object]:
    """Rank 1 may open few files: first by its soft limit, then by its hard one."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + 20, opened() + 4000))
    found: list[object] = [start("tcp")]
    limit = opened() + ROOM
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return [*found, start("auto"), start("tcp"), limit]


def test_few_descriptors_raise_the_limit_or_are_a_warning_or_an_error() -> None:
    """With enough for gloo, it carries what that rank sends: the others know, and go on."""
    ranks = run_ranks(SIZE, limited)
    limit = ranks[1][3]
    for raised, warned, refused, _ in ranks:
        assert raised[0] == SIZE and len(raised[1]) == SIZE - 1 and not raised[2]
        assert warned[0] == SIZE
        (text,) = refused
        assert 'transport="tcp": rank 1: ' in text and f"the limit is {limit}:" in text
    assert [warned[1] for _, warned, *_ in ranks] == [[2], [], [0]]
    (text,) = ranks[1][1][2]
    assert "rank 1: " in text and f"the limit is {limit}:" in text
    assert "file descriptors are needed" in text and "gloo" in text


def test_a_limit_below_what_gloo_needs_is_an_error_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(descriptors, "_opened", lambda: 30)
    # 64 hosts of 8 ranks: short of connections alone, which is told later.
    require_room(512, 8, "auto", gloo=True)
    with pytest.raises(TransportError, match=r"2000 ranks .*2102 file d.*30 are open.*is 1024:"):
        require_room(2000, 8, "auto", gloo=True)


def test_the_need_is_that_of_one_mesh_of_gloo_and_one_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr(descriptors, "_opened", lambda: 30)
    require_room(512, 8, "auto", gloo=True)
    # gloo 512 + 8; memory 2 * 7, TCP 504, and 6 beside; 30 are open and 64 to spare.
    assert set_to == [(30 + 64 + 520 + 14 + 504 + 6, 4096)]
    require_room(512, 8, "gloo", gloo=True, store=True)
    assert set_to[1:] == [(30 + 64 + 520 + 528, 4096)] * 2


def test_a_system_that_raises_no_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("sealed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert "limit is 100, which the system does not let it raise (sealed)" in (
        descriptors.shortage(500)
    )


def parts(rank: int) -> tuple[list[int], str]:
    """How many sockets there are before the group, with it, and after each of some splits.

    And what it says where there are too few descriptors for another one.
    """
    before = sockets()
    group = collectives.init(transport="tcp", timeout=30.0)
    counts = [before, sockets()]
    kept = []
    for ranks in ([0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3]):
        part = group.split(ranks)
        assert part is not None
        assert part.all_reduce(torch.ones(1000)).tolist() == [4.0] * 1000
        kept.append(part)
        counts.append(sockets())
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened() + 9, opened() + 9))
    with pytest.raises(TransportError) as caught:
        group.split([0, 1, 2, 3])
    collectives.shutdown()
    return counts, str(caught.value)


def test_groups_split_over_tcp_open_a_socket_to_each_neighbour() -> None:
    """gloo's listener is one more; its own connections are opened when they are used."""
    for (before, whole, *after), text in run_ranks(4, parts):
        # gloo's mesh and ours; gloo's listener; torch's way to the store, and rank 0's store.
        assert whole - before <= 2 * 3 + 8
        assert [count - whole for count in after] == [3 + 1, 2 * (3 + 1), 3 * (3 + 1)]
        assert text.startswith("rank 1 cannot split its group: ")
        assert "file descriptors are needed" in text
