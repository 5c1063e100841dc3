"""Ranks whose calls differ after many that did not: checks that each rank runs on its group."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import Average, CollectiveMismatchError, Group
from collectives.fused_buffer import FusedBuffer
from collectives.schedules.schedule import steps_of
from collectives.schedules.topology import Topology
from collectives.transport import Message
from tests.collectives.schedules.simulation import one_level

Call = Callable[[Group, torch.Tensor], Any]

# Within a record of a connection; in its ring; in two slots of it.
SMALL, MIDDLE, LARGE = 3, 10_000, 150_000


def _fused(group: Group, x: torch.Tensor) -> None:
    """Two slots of a buffer that is `x`'s memory: both are whole cache lines."""
    half = x.numel() // 2 // 16 * 16
    buffer = FusedBuffer([x[:half], x[half:]], memory=x)
    group.grouped_all_reduce(buffer.tensors, algorithm="xring")


CALLS: dict[str, tuple[int, Call]] = {
    "a": (SMALL, lambda group, x: group.all_reduce(x, name="a")),
    "b": (SMALL, lambda group, x: group.all_reduce(x, name="b")),
    "average": (SMALL, lambda group, x: group.all_reduce(x, Average, name="a")),
    "middle": (MIDDLE, lambda group, x: group.all_reduce(x)),
    "large": (LARGE, lambda group, x: group.all_reduce(x)),
    "rd": (MIDDLE, lambda group, x: group.all_reduce(x, algorithm="rd")),
    "rechd": (MIDDLE, lambda group, x: group.all_reduce(x, algorithm="rechd")),
    "xring": (MIDDLE, lambda group, x: group.all_reduce(x, algorithm="xring")),
    "scaled": (MIDDLE, lambda group, x: group.all_reduce(x, prescale=0.5, postscale=2.0)),
    "adasum": (MIDDLE, lambda group, x: group.all_reduce(x, Adasum, algorithm="vhdd")),
    "fused": (MIDDLE, _fused),
    "scatter": (MIDDLE, lambda group, x: group.reduce_scatter(x)),
    "broadcast": (SMALL, lambda group, x: group.broadcast(x, group.size - 1)),
    "gather": (SMALL, lambda group, x: group.all_gather(x)),
    "barrier": (SMALL, lambda group, x: group.barrier()),
}

# Of the same sizes and of others, of one schedule and of several, with and without an answer.
DIFFERENCES = [
    ("a", "b"),
    ("a", "average"),
    ("a", "middle"),
    ("middle", "large"),
    ("large", "a"),
    ("rd", "xring"),
    ("xring", "rechd"),
    ("adasum", "rechd"),
    ("scaled", "middle"),
    ("fused", "rd"),
    ("scatter", "xring"),
    ("a", "broadcast"),
    ("gather", "xring"),
    ("barrier", "rd"),
]


def fresh(group: Group, name: str) -> torch.Tensor:
    """Rank r's input: r + 1 everywhere."""
    return torch.full((CALLS[name][0],), float(group.rank + 1))


def make(group: Group, name: str) -> None:
    """The call, and a look at its answer, which is exact."""
    mine = fresh(group, name)
    answer = CALLS[name][1](group, mine)
    n = group.size
    total = n * (n + 1) / 2
    if name == "average":
        assert torch.equal(mine, torch.full_like(mine, total / n))
    elif name in ("broadcast", "barrier"):
        assert mine.eq(n if name == "broadcast" else group.rank + 1).all()
    elif name == "gather":
        assert torch.equal(answer, torch.arange(1.0, n + 1).repeat_interleave(SMALL))
    elif name == "scatter":
        assert answer.eq(total).all() and mine.eq(group.rank + 1).all()
    elif name != "adasum":
        assert torch.equal(mine, torch.full_like(mine, total)), name


def settle(group: Group) -> None:
    """Make every call twice, on all ranks alike."""
    for _ in range(2):
        for name in CALLS:
            make(group, name)


def check_differences(group: Group) -> None:
    """Any one rank, early or late, in another call: one error, inputs as before, and on."""
    settle(group)
    plan = random.Random(7)
    for first, second in DIFFERENCES:
        for ours, theirs in ((first, second), (second, first)):
            odd, late = plan.randrange(group.size), plan.randrange(group.size + 1)
            name = theirs if group.rank == odd else ours
            if group.rank == late:
                # So that the others have sent what they could.
                time.sleep(0.01)
            mine = fresh(group, name)
            with pytest.raises(CollectiveMismatchError, match="ranks disagree") as caught:
                CALLS[name][1](group, mine)
            assert torch.equal(mine, fresh(group, name)), (ours, theirs)
            texts = group.all_gather_bytes(str(caught.value).encode())
            assert len(set(texts)) == 1
            for again in (ours, theirs, "rd"):
                make(group, again)


def check_one_call_ahead(group: Group) -> None:
    """A rank that leaves out a call is told so until it makes as many as the others."""
    settle(group)
    order = ["a", "b", "rd", "xring", "a", "b"]
    mine = order[1:] if group.rank == group.size - 1 else order[:-1]
    for name in mine:
        with pytest.raises(CollectiveMismatchError):
            make(group, name)
    for name in order:
        make(group, name)


def check_all_differ(group: Group) -> None:
    settle(group)
    for turn in range(6):
        name = ["a", "rd", "xring", "adasum", "large", "scatter", "average", "b"][group.rank]
        time.sleep(0.002 * ((group.rank + turn) % 3))
        with pytest.raises(CollectiveMismatchError):
            make(group, name)
    make(group, "rd")


def check_join(group: Group) -> None:
    """Ranks join one after the other in the midst of the others' calls."""
    settle(group)
    for leaving in (0, group.size - 1):
        if group.rank == leaving:
            last = group.join([Adasum])
        else:
            others = [rank for rank in range(group.size) if rank != leaving]
            for name in ("a", "rd", "xring", "fused", "large", "a"):
                mine = fresh(group, name)
                CALLS[name][1](group, mine)
                assert mine.eq(sum(others) + len(others)).all(), name
            last = group.join([Adasum])
        assert last == max(rank for rank in range(group.size) if rank != leaving)
        make(group, "rd")
    assert group.join() == group.size - 1
    make(group, "a")


def check_messages(group: Group) -> None:
    """A call posts the messages of its schedule and no more."""
    transport = group.transport
    exchange = transport.exchange
    steps: list[str] = []

    def counted(sends: Sequence[Message], recvs: Sequence[Message], step: str, wait: float) -> None:
        steps.extend(step for message in sends if message.tensor.numel())
        exchange(sends, recvs, step, wait)

    transport.exchange = counted
    try:
        for name in ("rd", "rechd", "xring"):
            for _ in range(4):
                steps.clear()
                group.all_reduce(torch.ones(1021), algorithm=name, name=f"count {name}")
                schedule = one_level(name, 1, Topology(group.size, group.size))
                sent = sum(len(s.sends) for s in steps_of(schedule, group.rank))
                # Doubling and halving are made of what all put into their buffers.
                assert len(steps) == (sent if name == "xring" else 0)
        for _ in range(4):
            group.all_reduce(torch.ones(1021), Adasum, algorithm="vhdd")
            assert not any("negotiation" in step for step in steps)
        steps.clear()
        group.barrier()
        assert not steps
    finally:
        del transport.exchange


CHECKS: list[Callable[[Group], None]] = [
    check_messages,
    check_differences,
    check_one_call_ahead,
    check_all_differ,
    check_join,
]
