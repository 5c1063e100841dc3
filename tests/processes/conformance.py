"""What every transport must carry: checks that each rank runs on its group."""

from __future__ import annotations

import os

import pytest
import torch

import collectives
from collectives import Average, Group
from collectives.bootstrap import transport_selection
from collectives.schedules.registry import SCHEDULES
from collectives.transport import GlooTransport, HostTransport
from tests.frozen import table, worlds
from tests.frozen.cases import Case
from tests.frozen.errors import ENDS


def check_frozen_answers(group: Group) -> None:
    """Every call's bits and every error's text are those that the table has of threads."""
    kind = "messages" if group.transport.symmetric_memory is None else "shm"
    held = table.read()
    world = (kind, group.size, group.local_size)
    cases = [case for case in table.chosen(held) if case.world == world and _holds_anywhere(case)]
    assert len(cases) > 10
    found = dict(zip(map(str, cases), worlds.outcomes(group, cases), strict=True))
    mine: dict[str, table.Outcome] = {}
    for case in found:
        outcome = held.outcomes[case]
        mine[case] = outcome if isinstance(outcome, str) else outcome[group.rank]
    different = table.differences(held._replace(outcomes=mine), found)
    assert not different, "\n".join(different)


def _holds_anywhere(case: Case) -> bool:
    """Whether neither link rates that init has measured nor a process group's sum matter to it.

    And whether the group goes on.
    """
    by_rates = "all_reduce" in case.kind and case.algorithm in ("-", "auto")
    return (
        not by_rates
        and "collective" not in case.algorithm + case.option
        and case.option not in ENDS
    )


def check_float16_average(group: Group) -> None:
    """Of the largest exact sums, by a library too."""
    library = [] if group.transport.process_group is None else ["collective", "collective/rechd"]
    for name in [None, *SCHEDULES, *library]:
        mine = torch.full((1021,), 40000.0, dtype=torch.float16)
        group.all_reduce(mine, Average, algorithm=name)
        # n - 1 additions and two divisions, each rounding once.
        eps = torch.finfo(torch.float16).eps
        assert ((mine.double() - 40000.0).abs() <= (group.size + 1) * eps * 40000.0).all()


def check_transport(group: Group) -> None:
    """Run all checks."""
    check_frozen_answers(group)
    check_float16_average(group)


def check_in_process(rank: int, transport: str) -> None:
    """Run them as one of several processes: over "gloo", "shm" or "hybrid"."""
    group = start_or_pretend(transport)
    assert (group.rank, group.size) == (rank, group.transport.size)
    check_transport(group)
    group.close()
    collectives.shutdown()
    assert not collectives.is_initialized()


def start(transport: str, timeout: float = 60.0) -> Group:
    """collectives.init, with a look at what it chose."""
    group = collectives.init(timeout=timeout, transport=transport)
    assert isinstance(group.transport, GlooTransport if transport == "gloo" else HostTransport)
    return group


def start_or_pretend(transport: str, timeout: float = 60.0) -> Group:
    """start, or two hosts where "hybrid" is asked for."""
    return pretend_two_hosts(timeout) if transport == "hybrid" else start(transport, timeout)


def pretend_two_hosts(timeout: float = 60.0) -> Group:
    """A group whose even ranks share memory, and whose odd ones do; gloo is between them."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_selection, "host_place", lambda: rank % 2)
        transport = start("auto", timeout).transport
    assert isinstance(transport, HostTransport)
    assert transport.near == tuple(range(rank % 2, transport.size, 2))
    assert transport.symmetric_memory is None
    return Group(transport, timeout=timeout, local_rank=rank, local_size=transport.size)
