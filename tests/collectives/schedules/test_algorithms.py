"""Every algorithm is verified, reduces in the order and costs what its docstring says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

import kernels
from collectives import Group, run_threads
from collectives.schedules import (
    binomial_tree,
    bruck,
    direct,
    parameter_server,
    recursive_doubling,
    recursive_halving,
    ring,
)
from collectives.schedules.algorithm import ALL
from collectives.schedules.registry import LIBRARIES
from collectives.schedules.schedule import Schedule, sharded
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import (
    answers,
    cost,
    folded,
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
            for chunks in (None, 1, 1 + n % 5) if n < 9 else (1 + n % 9,):
                schedule = ring.reduce(n, root, chunks)
                steps = schedule.chunks + n - 2 if n > 1 else 0
                assert verify(schedule).steps == steps


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
                schedule = parameter_server.all_reduce(
                    n, 1 + n // 4, whole_segments=True, tensors=tensors, first=first
                )
                assert verify(schedule).carries_adasum
                owners = parameter_server.scatter_gather(
                    n, 1 + n // 4, tensors=tensors, first=first
                )
                gathering = min(n, (1 + n // 4) * tensors)
                assert len({*owners.owners}) == len(owners.owners) == gathering
                assert owners.owners[0] == first


def test_tree_reduce_and_brucks_all_gather_are_proved_in_log_n_steps() -> None:
    for n in SIZES:
        steps = (n - 1).bit_length()
        assert verify(bruck.all_gather(n)).steps == steps
        for root in range(n) if n < 17 else (n // 2, n - 1):
            proof = verify(binomial_tree.reduce(n, root))
            assert proof.steps == steps and proof.tree is not None


@QUICK_AND_REST
def test_direct_is_proved_for_every_size(sizes: Sequence[int]) -> None:
    for n in sizes:
        for schedule in (direct.all_reduce(n), sharded(direct.all_reduce(n), 2)):
            proof = verify(schedule)
            assert proof.meets == ALL
            assert proof.by_tree == (n > 1)
            assert proof.steps == (2 if n > 1 else 0)
        scattered = verify(direct.reduce_scatter(n))
        assert scattered.steps == (n > 1) and scattered.by_tree == (n > 1)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 64])
def test_costs_of_direct_are_as_documented(n: int) -> None:
    costs = cost(direct.all_reduce(n))
    assert costs.steps == 2
    assert costs.sent == costs.received == (Fraction(2 * (n - 1), n),) * n
    assert costs.staged == Fraction(n - 1, n)
    for rank in range(n):
        for step in direct.all_reduce(n).steps(rank):
            others = [(rank + 1 + i) % n for i in range(n - 1)]
            assert sorted(each.peer for each in step.sends) == sorted(others)
        assert [each.peer for each in next(iter(direct.all_reduce(n).steps(rank))).sends] == others


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8, 13])
def test_tree_reduce_has_the_tree_of_rd(n: int) -> None:
    for root in range(n):
        got = answers(binomial_tree.reduce(n, root))[root]
        assert got == answers(recursive_doubling.all_reduce(n))[root]


def test_messages_in_shards_are_proved() -> None:
    for n in (*range(1, 18), 33, 64):
        for name in ("rd", "vhdd" if n % 2 else "rechd"):
            schedule = one_level(name, 2 + n % 3, Topology(n, n))
            assert schedule.chunks == one_level(name, 1, Topology(n, n)).chunks * (2 + n % 3)
            assert verify(schedule).carries_adasum


@pytest.mark.parametrize("n", [2, 3, 5])
def test_reduce_leaves_the_line_that_ends_at_the_root(n: int) -> None:
    for root in range(n):
        line = folded([(root + 1 + i) % n for i in range(n)])
        assert answers(ring.reduce(n, root))[root] == [line] * n


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_costs_of_rings_are_as_documented(n: int) -> None:
    share = Fraction(2 * (n - 1), n)
    for k in (1, 2):
        costs = cost(one_level("xring", k, Topology(n, n)))
        assert costs.steps == 2 * (n - 1)
        assert costs.sent == costs.received == (share,) * n
        assert costs.staged == Fraction(1, n)
    for chunks in (1, 4, 4 * n):
        costs = cost(ring.linear_all_reduce(n, chunks))
        assert costs.steps == chunks + 2 * n - 3
        assert costs.sent == (2,) * (n - 2) + (1, 1)
        assert costs.received == costs.sent[-1:] + costs.sent[:-1]
        assert costs.staged == Fraction(1, chunks)
        costs = cost(ring.reduce(n, 1, chunks))
        assert costs.steps == chunks + n - 2
        assert sorted(costs.sent) == sorted(costs.received) == [0] + [1] * (n - 1)
        assert costs.sent[1] == costs.received[2 % n] == 0
        assert costs.staged == Fraction(1, chunks)
    assert cost(ring.reduce(n, 0)).staged == Fraction(1, n)


@pytest.mark.parametrize(("n", "shards"), [(2, 1), (2, 2), (5, 1), (5, 3), (8, 8)])
def test_costs_of_the_shuffle_are_as_documented(n: int, shards: int) -> None:
    costs = cost(parameter_server.all_reduce(n, shards))
    gather = [i * n // shards for i in range(shards)]
    expected = tuple(Fraction(n + shards - 2, shards) if r in gather else 1 for r in range(n))
    assert costs.steps == 2
    assert costs.sent == costs.received == expected
    assert costs.staged == Fraction(n - 1, shards)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 64])
def test_costs_of_bruck_are_as_documented(n: int) -> None:
    costs = cost(bruck.all_reduce(n))
    assert costs.steps == (n - 1).bit_length()
    assert costs.sent == costs.received == (n - 1,) * n
    for rank in range(n):
        # All that goes to one peer is in one message, or in two where ranks wrap around.
        assert all(len(step.sends) <= 2 for step in bruck.all_reduce(n).steps(rank))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_bruck_reduces_in_rank_order_with_equal_bits(size: int) -> None:
    """Of sums each rank rounds in the same order, which is that of adding rank after rank."""

    def work(group: Group) -> list[torch.Tensor]:
        results = []
        for count, shards in ((0, 1), (1, 1), (7, 3), (1000, 1)):
            values = torch.randn(count, generator=torch.Generator().manual_seed(group.rank))
            results.append(group.all_reduce(values, algorithm=f"bruck#{shards}"))
        return results

    answers = run_threads(size, work)
    for i, count in enumerate((0, 1, 7, 1000)):
        parts = [
            torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(size)
        ]
        expected = kernels.sum_n(parts) if size > 2 else parts[0] + parts[1]
        for mine in answers:
            assert torch.equal(mine[i], expected)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_costs_of_halving_and_doubling_are_as_documented(n: int) -> None:
    levels = n.bit_length() - 1
    for shards in (1, 3):
        costs = cost(one_level("rechd", shards, Topology(n, n)))
        assert costs.steps == 2 * levels
        assert costs.sent == costs.received == (Fraction(2 * (n - 1), n),) * n
        assert costs.staged == Fraction(1, 2)
        costs = cost(one_level("rd", shards, Topology(n, n)))
        assert costs.steps == levels
        assert costs.sent == costs.received == (levels,) * n
        assert costs.staged == 1
    for make in (recursive_halving.all_reduce, recursive_doubling.all_reduce):
        folded_costs, plain = cost(make(n + 1)), cost(make(n))
        assert folded_costs.steps == plain.steps + 2
        assert max(folded_costs.sent) == max(plain.sent) + 1
        assert folded_costs.staged == 1


@pytest.mark.parametrize(
    "schedule",
    [
        one_level("xring", 2, Topology(4, 2)),
        one_level("xring", 1, Topology(3, 3)),
        one_level("rechd", 1, Topology(6, 6)),
        one_level("rechd", 1, Topology(8, 8)),
        ring.linear_all_reduce(4, 3),
        ring.reduce(4, 1, 3),
        parameter_server.all_reduce(4, 2),
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


def test_shards_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"xring takes 1 to 2 shards, .* got 3"):
        one_level("xring", 3, Topology(4, 2))
    with pytest.raises(ValueError, match=r"xring takes 1 to 2 shards, .* got 3"):
        one_level("xring", 3, Topology(4, 2), one_tree=True)
    with pytest.raises(ValueError, match=r"pscpu takes 1 to 4 shards, .* got 5"):
        one_level("pscpu", 5, Topology(4, 2))
    with pytest.raises(ValueError, match="rd takes at least 1 shard, got 0"):
        one_level("rd", 0, Topology(4, 2))
    with pytest.raises(ValueError, match="cannot be sharded"):
        sharded(ring.all_gather(4), 2)


def test_names_and_sizes_out_of_range_are_refused() -> None:
    for name in ("auto", "bogus"):
        with pytest.raises(ValueError, match=f"'{name}' is no algorithm: use xring.*nccl"):
            one_level(name, 1, Topology(4, 2))
    for name in LIBRARIES:
        with pytest.raises(ValueError, match=f"'{name}' is no schedule: use .*xring"):
            one_level(name, 1, Topology(4, 2))
    for make in (
        ring.all_reduce,
        ring.linear_all_reduce,
        recursive_halving.all_reduce,
        recursive_doubling.all_reduce,
        parameter_server.all_reduce,
    ):
        with pytest.raises(ValueError, match="size"):
            make(0)
    with pytest.raises(ValueError, match="permutation of 0 to 2"):
        ring.all_reduce(3, ((0, 1, 1),))
    for make in (ring.reduce, binomial_tree.broadcast, binomial_tree.reduce):
        with pytest.raises(ValueError, match="root"):
            make(3, 3)
    for make in (ring.linear_all_reduce, lambda n, chunks: ring.reduce(n, 0, chunks)):
        with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
            make(3, 0)
