"""Ranks on two and three hosts: right answers, bytes on a slow link, a link that is cut.

Hosts are network namespaces of one machine (see network.py), started by one torchrun each, with
gloo between them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.schedules.schedule import split_bounds, steps_of
from collectives.schedules.topology import Topology
from tests.collectives.schedules.simulation import one_level
from tests.network_namespaces.network import Hosts, why_not

LARGE = 1 << 20
# Hosts, ranks on each, and how those of one host exchange.
SHAPES = [
    pytest.param((2, 2, "auto"), id="2x2-auto"),
    pytest.param((2, 2, "gloo"), marks=pytest.mark.slow, id="2x2-gloo"),
    pytest.param((3, 2, "auto"), marks=pytest.mark.slow, id="3x2-auto"),
]
CUT = 1
TIMEOUT = 3.0
# Starting nine processes that import torch takes 10 to 40 s on two cores that others use too.
START = 90.0


@dataclass
class Outcome:
    """What all ranks of one shape said, once each has given the frozen answers."""

    hosts: int
    local_size: int
    transport: str
    ranks: list[dict[str, Any]]
    cut: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return self.hosts * self.local_size

    def sent(self, algorithm: str) -> list[int]:
        """By host, the bytes that it sent in a sum of LARGE float32."""
        return [rank["sent"][algorithm] for rank in self.ranks[:: self.local_size]]


def _run(hosts_count: int, local_size: int, transport: str, directory: Path) -> Outcome:
    ranks = range(hosts_count * local_size)
    algorithms = ("xring", "rechd", "xring/xring")
    plan = {"timeout": TIMEOUT, "algorithms": algorithms, "numel": LARGE}

    def collect(hosts: Hosts, kind: str, timeout: float) -> list[dict[str, Any]]:
        files = [directory / f"rank{r}.{kind}" for r in ranks]
        hosts.wait_for(files, timeout)
        return [torch.load(path) for path in files]

    with Hosts(hosts_count, rate="200mbit") as hosts:
        hosts.torchrun(
            "tests.network_namespaces.job",
            str(directory),
            json.dumps(plan),
            local_size=local_size,
            transport=transport,
            logs=directory,
        )
        said = collect(hosts, "sums", START)
        collect(hosts, "ready", 10.0)
        # An all-reduce takes 0.3 s or more on this link, so the cut falls into one.
        time.sleep(0.2)
        hosts.cut(CUT)
        when = time.monotonic()
        after = collect(hosts, "cut", TIMEOUT + 15.0)
        for rank in after:
            rank["waited"] = rank["when"] - when
        collect(hosts, "ended", TIMEOUT + 10.0)
    return Outcome(hosts_count, local_size, transport, said, after)


@pytest.fixture(scope="module", params=SHAPES)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    if reason := why_not():
        pytest.skip(reason)
    hosts, local_size, transport = request.param
    return _run(hosts, local_size, transport, tmp_path_factory.mktemp("hosts"))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not list(Path("/run/netns").glob(f"adasum-test-{os.getpid()}-*"))


def test_ranks_know_their_hosts(outcome: Outcome) -> None:
    for rank, said in enumerate(outcome.ranks):
        assert said["host"] == f"host{rank // outcome.local_size}"
        assert said["shape"] == (outcome.hosts, outcome.local_size)
        first = rank // outcome.local_size * outcome.local_size
        near = set(range(first, first + outcome.local_size)) - {rank}
        assert said["near"] == ([] if outcome.transport == "gloo" else sorted(near))


def _crossing(outcome: Outcome, algorithm: str, host: int) -> int:
    """Bytes that a flat all-reduce of LARGE float32 sends from one host to others."""
    schedule = one_level(algorithm, 1, Topology(outcome.size, outcome.size))
    cuts = split_bounds(LARGE, schedule.chunks)
    size = outcome.local_size
    return 4 * sum(
        cuts[transfer.stop] - cuts[transfer.start]
        for rank in range(host * size, (host + 1) * size)
        for step in steps_of(schedule, rank)
        for transfer in step.sends
        if transfer.peer // size != host
    )


def _link_bound(sent: int, received: int) -> float:
    """The most a link may count for a payload: a 66-byte header (Ethernet, IP, TCP with time
    stamps) for every 1448 bytes sent and for every acknowledgement of as many received, and 128 KiB
    for the two barriers and the agreement."""
    return sent + 66 / 1448 * (sent + received) + 131072


@pytest.mark.parametrize("algorithm", ["xring", "rechd"])
def test_flat_sends_over_the_link_what_its_schedule_says(outcome: Outcome, algorithm: str) -> None:
    planned = [_crossing(outcome, algorithm, host) for host in range(outcome.hosts)]
    for host, sent in enumerate(outcome.sent(algorithm)):
        assert planned[host] <= sent <= _link_bound(planned[host], max(planned))


def test_two_level_spares_the_slow_link(outcome: Outcome) -> None:
    """Flat, a ring sends 2(n-1)/n of the buffer over each link; two-level 2(m-1)/m, m hosts."""
    flat, two = outcome.sent("xring"), outcome.sent("xring/xring")
    hosts, size = outcome.hosts, outcome.size
    planned = 4 * LARGE * 2 * (hosts - 1) // hosts
    ratio = (2 * (size - 1) / size) / (2 * (hosts - 1) / hosts)
    for ours, theirs in zip(two, flat, strict=True):
        assert planned <= ours <= _link_bound(planned, planned)
        # Both carry up to 9.2 % of headers and acknowledgements, see _link_bound.
        assert theirs / ours >= ratio / 1.092


def test_cut_link(outcome: Outcome) -> None:
    """Every rank gets the promised error in time, naming a peer and the step, and can still end."""
    named = []
    for rank, said in enumerate(outcome.cut):
        assert said["error"] == "CollectiveTimeoutError", said["text"]
        assert 0.0 < said["waited"] <= TIMEOUT + 5.0
        found = re.search(rf"rank {rank} got no answer from rank (\d+) in step \d+ ", said["text"])
        assert found is not None, said["text"]
        assert "all_reduce 'w'" in said["text"]
        named.append(int(found[1]) // outcome.local_size)
    hosts = [rank // outcome.local_size for rank in range(outcome.size)]
    assert any(CUT in pair and len(set(pair)) == 2 for pair in zip(hosts, named, strict=True))
