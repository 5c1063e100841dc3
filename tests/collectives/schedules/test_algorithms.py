"""Every algorithm is verified, reduces in the order and costs what its docstring says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from collectives.schedules import copying, direct, halving, ring
from collectives.schedules.registry import LIBRARIES
from collectives.schedules.schedule import Schedule
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import (
    one_level,
    with_step,
)

SIZES = range(1, 65)
# A proof of many ranks takes long. A rest is of the sizes that the quick ones leave out.
FEW = (*range(1, 25), 31, 32, 33, 64)
QUICK_AND_REST = pytest.mark.parametrize(
    "sizes",
    [FEW, pytest.param(sorted({*SIZES} - {*FEW}), marks=pytest.mark.slow)],
    ids=["quick", "rest"],
)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def test_rings_at_once_are_proved() -> None:
    """All topologies and shard counts to 10 ranks."""
    for n in range(1, 11):
        for local in divisors(n):
            for k in range(1, local + 1):
                prove_rings(n, local, k)


@pytest.mark.slow
def test_rings_at_once_of_many_ranks_are_proved() -> None:
    """One topology of up to 4 shards for each size to 64, and as many rings as 24 ranks."""
    for n in range(11, 65):
        local = divisors(n)[-1 - n % (len(divisors(n)) - 1)]
        prove_rings(n, local, 1 + n % min(local, 4))
    prove_rings(24, 24, 24)


def prove_rings(n: int, local: int, k: int) -> None:
    schedule = one_level("xring", k, Topology(n, local))
    assert schedule.chunks == n * k
    assert verify(schedule).steps == 2 * (n - 1)


@QUICK_AND_REST
def test_linear_ring_is_proved(sizes: Sequence[int]) -> None:
    for n in sizes:
        for chunks in (1, 2, n, 4 * n) if n < 17 else (1 + n % 7,):
            proof = verify(ring.linear_all_reduce(n, chunks))
            assert proof.carries_adasum
            assert proof.steps == (chunks + 2 * n - 3 if n > 1 else 0)


@QUICK_AND_REST
def test_reduce_is_proved(sizes: Sequence[int]) -> None:
    for n in sizes:
        for root in range(n) if n < 9 else (n // 2, n - 1):
            for parts in (module.scatter_gather(n) for module in (halving, direct, ring)):
                schedule = parts.reduce(root)
                scatter = len(list(parts.scatter(0)))
                assert verify(schedule).steps == scatter + 1


def test_shuffle_is_proved() -> None:
    """All shard counts to 12 ranks; one in between for each larger size."""
    for n in SIZES:
        name = "psgpu" if n % 2 else "pscpu"
        for shards in range(1, n + 1) if n < 13 else (2 + n % 11,):
            proof = verify(one_level(name, shards, Topology(n, n), one_tree=True))
            assert proof.carries_adasum
            assert proof.steps == (2 if n > 1 else 0)


def test_dealt_shuffle_is_proved_from_every_first_rank() -> None:
    """As many gather ranks as there are shards of all tensors, each another rank."""
    for n in range(1, 13):
        for tensors in (1, 2, n, 3 * n):
            for first in range(n):
                schedule = direct.shuffle(
                    n, 1 + n // 4, whole_segments=True, tensors=tensors, first=first
                )
                assert verify(schedule).carries_adasum
                owners = direct.shuffle_parts(n, 1 + n // 4, tensors=tensors, first=first)
                gathering = min(n, (1 + n // 4) * tensors)
                assert len({*owners.owners}) == len(owners.owners) == gathering
                assert owners.owners[0] == first


@pytest.mark.parametrize(
    "schedule",
    [
        one_level("xring", 2, Topology(4, 2)),
        one_level("xring", 1, Topology(3, 3)),
        one_level("rechd", 1, Topology(6, 6)),
        one_level("rechd", 1, Topology(8, 8)),
        ring.linear_all_reduce(4, 3),
        halving.scatter_gather(4).reduce(1),
        direct.shuffle(4, 2),
        one_level("vhdd", 2, Topology(3, 3)),
        one_level("direct", 2, Topology(3, 3)),
        one_level("rd", 2, Topology(3, 3)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_every_lost_or_misplaced_message_is_found(schedule: Schedule) -> None:
    for rank in range(schedule.size):
        for number, step in enumerate(schedule.steps(rank)):
            for side in ("sends", "recvs"):
                transfers = getattr(step, side)
                for i, transfer in enumerate(transfers):
                    kept = transfers[:i] + transfers[i + 1 :]
                    moved = transfer._replace(peer=(transfer.peer + 1) % schedule.size)
                    for wrong in (kept, (*transfers[:i], moved, *transfers[i + 1 :])):
                        bad = with_step(schedule, rank, number, step._replace(**{side: wrong}))
                        with pytest.raises(ScheduleError):
                            verify(bad)


def test_names_and_sizes_out_of_range_are_refused() -> None:
    for name in ("auto", "bogus"):
        with pytest.raises(ValueError, match=f"'{name}' is not an algorithm: use xring.*nccl"):
            one_level(name, 1, Topology(4, 2))
    for name in LIBRARIES:
        with pytest.raises(ValueError, match=f"'{name}' has no schedule: use .*xring"):
            one_level(name, 1, Topology(4, 2))
    for make in (
        ring.all_reduce,
        ring.linear_all_reduce,
        halving.all_reduce,
        halving.doubling,
        direct.shuffle,
    ):
        with pytest.raises(ValueError, match="size"):
            make(0)
    with pytest.raises(ValueError, match="permutation of 0 to 2"):
        ring.all_reduce(3, ((0, 1, 1),))
    for make in (copying.broadcast, lambda n, root: halving.scatter_gather(n).reduce(root)):
        with pytest.raises(ValueError, match="root"):
            make(3, 3)
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        ring.linear_all_reduce(3, 0)
