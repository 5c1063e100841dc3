"""A network that is cut: two hosts of one rank each, in a plain collective and in training.

Hosts are network namespaces of one machine (tests/network_namespaces). All cases run at once
over one link.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.cases import EXIT, GRACE, TIMEOUT, Case
from tests.faults.ranks import MAIN, Report, environment, read, wait_for
from tests.network_namespaces.network import LINK, Hosts, why_not
from tests.processes.nursery import Nursery

CASES = [
    Case("average", "until cut", "", "gloo", victim=-1, size=2),
    Case("delta", "until cut", "", "gloo", victim=-1, size=2),
    Case("gradient", "until cut", "", "gloo", victim=-1, size=2),
    Case("ddp", "until cut", "", "gloo", victim=-1, size=2),
    Case("all_reduce", "until cut", "", "gloo", victim=-1, size=2),
    Case("all_reduce", "after cut", "", "gloo", victim=-1, size=2),
]


# tests/network_namespaces cuts a network among the fast tests.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, tuple[Report, float]]]:
    """Every selected case's report, and when the network was cut."""
    name = test_cut_network_is_a_timeout_on_both_hosts.__name__
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == name
    ]
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("network")
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate="200mbit"))
        nurseries = [stack.enter_context(Nursery(hosts.command(i, ()))) for i in range(hosts.count)]
        ranks = {}
        for number, case in enumerate(cases):
            place = directory / str(number)
            (place / "tmp").mkdir(parents=True)
            job = {**asdict(case), "directory": str(place)}
            ranks[case] = [
                nursery.start(
                    MAIN,
                    job,
                    {
                        **environment(rank, 2, 29500 + number, place),
                        "LOCAL_RANK": "0",
                        "LOCAL_WORLD_SIZE": "1",
                        "MASTER_ADDR": "10.77.0.1",
                        "GLOO_SOCKET_IFNAME": LINK,
                    },
                    place / f"rank{rank}.log",
                )
                for rank, nursery in enumerate(nurseries)
            ]
        places = [directory / str(number) for number in range(len(cases))]
        for place in places:
            for rank in (0, 1):
                wait_for(place / f"rank{rank}.ready")
        for place in places:
            (place / "begin").touch()
        # So that steps are under way.
        time.sleep(0.3)
        hosts.cut(1)
        when = time.monotonic()
        for place in places:
            (place / "cut").touch()
        deadline = when + TIMEOUT + GRACE + EXIT
        for case in cases:
            for rank in ranks[case]:
                rank.wait(deadline)
        said = {}
        for number, case in enumerate(cases):
            place = directory / str(number)
            said[case] = (
                Report(
                    [rank.status() for rank in ranks[case]],
                    [read(place / f"rank{rank}.jsonl") for rank in (0, 1)],
                    [rank.ended for rank in ranks[case]],
                    [(place / f"rank{rank}.log").read_text()[-3000:] for rank in (0, 1)],
                    [str(path) for path in (place / "tmp").iterdir()],
                ),
                when,
            )
    yield said
    assert not list(Path("/run/netns").glob(f"adasum-test-{os.getpid()}-*"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_network_is_a_timeout_on_both_hosts(
    case: Case, reports: dict[Case, tuple[Report, float]]
) -> None:
    report, cut = reports[case]
    assert report.statuses == [1, 1], report.said
    for rank in (0, 1):
        error = report.one(rank, "error")
        assert "CollectiveTimeoutError" in error["kinds"], report.said[rank]
        assert f"rank {1 - rank}" in error["text"]
        assert "in step " in error["text"]
        assert 0.0 < error["when"] - cut <= case.timeout + GRACE
        ended = report.ended[rank]
        assert ended is not None
        assert ended - error["when"] <= EXIT, "it hung at exit"
    assert not report.left
