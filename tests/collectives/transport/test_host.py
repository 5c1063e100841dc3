"""How ranks of one host come to share memory: what is refused, what is left behind."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives.transport import Transport
from tests.collectives.transport.thread_ranks import (
    NO_MEMFD,
    TIMEOUT,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

pytestmark = NO_MEMFD
LONG = 3_000_000


def mapped() -> list[str]:
    """What this process's memory map calls the memory that ranks share."""
    with open("/proc/self/maps") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if "memfd:adasum" in line]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_has_a_name_or_is_left_behind() -> None:
    gc.collect()
    before, files = len(mapped()), descriptors()
    transports = connect(3)
    assert set(mapped()) == {"/memfd:adasum-host (deleted)"} and len(mapped()) - before == 3
    # The memory's, which mmap keeps, and the other ranks' processes'.
    assert descriptors() - files == 3 * 3
    for transport in transports:
        transport.close()
    del transports, transport
    gc.collect()
    assert len(mapped()) == before and descriptors() == files


def test_close_releases_the_memory_although_the_transport_is_kept() -> None:
    gc.collect()
    before = len(mapped())
    transports = connect(2)
    together(
        lambda: exchange(transports[0], [(1, noise(5, 1))], []),
        lambda: exchange(transports[1], [], [(0, poisoned(5))]),
    )
    for transport in transports:
        transport.close()
    gc.collect()
    assert len(mapped()) == before and repr(transports[0]).startswith("HostTransport")


def split(transports: list[Transport], ranks: list[int]) -> list[Transport]:
    """A part's transports, in its order."""
    return together(*(lambda r=r: transports[r].split(ranks, TIMEOUT) for r in ranks))


def test_parts_of_ranks_on_two_hosts_share_memory_where_the_whole_does() -> None:
    whole = connect(4, hosts=(0, 1, 0, 1))
    assert [each.near for each in whole] == [(0, 2), (1, 3)] * 2
    assert [each.symmetric_memory for each in whole] == [None] * 4
    near, far = split(whole, [2, 0]), split(whole, [1, 2])
    assert all(each.symmetric_memory is not None for each in near)
    # These share none: their messages go as those between the hosts do.
    assert [type(each).__name__ for each in far] == ["ThreadTransport"] * 2
    mixed = split(whole, [3, 0, 1])
    assert [each.near for each in mixed] == [(0, 2), (1,), (0, 2)]
    assert mixed[1].named([0]) == "rank 3"
    got = {1: poisoned(LONG), 2: poisoned(LONG)}
    together(
        lambda: exchange(mixed[0], [(1, noise(LONG, 1)), (2, noise(LONG, 2))], []),
        lambda: exchange(mixed[1], [], [(0, got[1])]),
        lambda: exchange(mixed[2], [], [(0, got[2])]),
    )
    assert all(torch.equal(got[seed], noise(LONG, seed)) for seed in (1, 2))


REFUSED: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "memory": (os, "memfd_create", lambda *_: True),
    "its length": (os, "ftruncate", lambda *_: True),
    "a mapping": (mmap, "mmap", lambda fd, *_: fd >= 0),
    "another's descriptor": (os, "open", lambda path, *_: str(path).startswith("/proc/")),
    "a look at processes": (os, "pidfd_open", lambda *_: True),
}


@pytest.mark.parametrize("often", [True, False])
@pytest.mark.parametrize("what", REFUSED)
def test_where_the_system_refuses_ranks_share_no_memory(
    what: str, often: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused to one rank, none of the host's has it, and nothing is left open."""
    module, name, here = REFUSED[what]
    real, count = getattr(module, name), itertools.count()

    def refuse(*arguments: Any, **options: Any) -> Any:
        # Each rank looks at its own process, then maps the memory and looks at two others'. Where
        # memory is refused to one rank, the others use that of the first one, which may be it.
        if here(*arguments) and (often or next(count) == (5 if name == "pidfd_open" else 1)):
            raise OSError("refused")
        return real(*arguments, **options)

    gc.collect()
    files = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        transports = connect(3)
    if often or what not in ("memory", "its length"):
        assert [type(each).__name__ for each in transports] == ["ThreadTransport"] * 3
    for each in transports:
        each.close()
    del transports, each
    gc.collect()
    assert descriptors() == files
