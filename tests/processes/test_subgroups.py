"""Groups of some of a group's ranks, in threads and in real processes."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import Group, TransportError
from collectives.transport import HostTransport
from tests.processes.conformance import check_transport, start_or_pretend
from tests.processes.harness import run_ranks


def total(group: Group, value: float) -> float:
    return float(group.all_reduce(torch.tensor([value])))


def check_parts(whole: Group) -> None:
    """Disjoint, overlapping, single and whole parts, in any order, one after the other."""
    n = whole.size
    for ranks in ([0], [n - 1, 0], [0, 1], [0, 1], list(range(n)), list(range(1, n))):
        part = whole.split(ranks)
        assert (part is None) == (whole.rank not in ranks)
        if part is not None:
            assert (part.rank, part.size) == (ranks.index(whole.rank), len(ranks))
            assert (part.local_rank, part.local_size, part.num_nodes) == (part.rank, part.size, 1)
            assert part.all_gather(torch.tensor([whole.rank])).tolist() == ranks
            assert total(part, 1.0 + whole.rank) == sum(ranks) + len(ranks)
            assert part.timeout == whole.timeout
            part.close()
        assert total(whole, 1.0) == n


def check_two_at_once(whole: Group) -> None:
    """A group and two of its parts, each used by a thread of its own, keep their messages apart."""
    one, two = whole.split(range(whole.size)), whole.split(range(whole.size))
    assert one is not None and two is not None
    wrong: list[str] = []

    def work(group: Group, value: float) -> None:
        for i in range(40):
            tensor = torch.full((1 + 97 * i,), value + i)
            # Named, since another thread made calls on the whole group before.
            group.all_reduce(tensor, name="at once")
            if not torch.equal(tensor, torch.full_like(tensor, group.size * (value + i))):
                wrong.append(f"{value} {i}")

    threads = [
        threading.Thread(target=work, args=(group, value))
        for group, value in ((whole, 1.0), (one, 1000.0), (two, 1e6))
    ]
    # In another order on every other rank: none of the groups may wait for another one.
    if whole.rank % 2:
        threads.reverse()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def all_checks(whole: Group) -> None:
    check_parts(whole)
    check_two_at_once(whole)


def test_threads() -> None:
    collectives.run_threads(3, all_checks)


def test_a_part_ends_with_its_group() -> None:
    def run(whole: Group) -> Group | None:
        return whole.split([0, 1])

    first, second, third = collectives.run_threads(3, run)
    assert third is None and first is not None and second is not None and first.closed
    with pytest.raises(TransportError, match="shut down"):
        second.barrier()


def test_new_group_is_a_part_of_the_default_group() -> None:
    def run(whole: Group) -> None:
        part = collectives.new_group([2, 1])
        assert (part is None) == (whole.rank == 0)
        if part is not None:
            assert total(part, float(whole.rank)) == 3.0

    collectives.run_threads(3, run)


def processes(rank: int, transport: str) -> None:
    group = start_or_pretend(transport)
    if transport == "hybrid":
        part = group.split([0, 2, 1])
        if part is not None:
            assert isinstance(part.transport, HostTransport)
            assert part.transport.near == [(0, 1), (0, 1), (2,)][part.rank]
            assert total(part, 1.0) == 3.0
    else:
        all_checks(group)
    # A part passes every transport's suite while another part is alive.
    part = group.split(range(group.size))
    assert part is not None
    check_transport(part)
    group.close()
    assert part.closed
    collectives.shutdown()


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("gloo", 3),
        ("shm", 3),
        pytest.param("hybrid", 4, marks=pytest.mark.slow),
    ],
)
def test_processes(transport: str, size: int) -> None:
    run_ranks(size, processes, transport)


def adopt(rank: int) -> list[object]:
    """from_process_group: on pairs that overlap, and beside torch's own messages."""
    dist.init_process_group("gloo")
    # Only some ranks are in these, so torch has made another number of groups on each rank.
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
    said: list[object] = []
    for members, pair in zip(([0, 1], [1, 2]), pairs, strict=True):
        if rank in members:
            group = collectives.from_process_group(pair, timeout=30.0)
            assert collectives.from_process_group(pair) is group
            assert isinstance(group.transport, HostTransport)
            assert (group.rank, group.size) == (members.index(rank), 2)
            assert (group.local_rank, group.local_size) == (group.rank, 2)
            theirs = torch.ones(3)
            work = dist.all_reduce(theirs, group=pair, async_op=True)
            said.append(total(group, float(rank)))
            assert work is not None
            work.wait()
            assert theirs.tolist() == [2.0, 2.0, 2.0]
            group.close()
            again = collectives.from_process_group(pair)
            assert again is not group
            said.append(total(again, 10.0 * rank))
            # torch's own sum of the part, whose name follows from the ranks too.
            value = torch.ones(1)
            again.all_reduce(value, algorithm="collective")
            assert value.item() == 2.0
        elif rank == 0:
            with pytest.raises(TypeError, match="that this rank is in"):
                collectives.from_process_group(pair)
    whole = collectives.from_process_group(dist.group.WORLD, timeout=30.0)
    assert not collectives.is_initialized()
    said.append(total(whole, 1.0))
    part = whole.split([0, 2])
    if part is not None:
        said.append(total(part, 1.0))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        collectives.from_process_group(pairs[0])
    return said


def test_from_process_group() -> None:
    assert run_ranks(3, adopt) == [
        [1.0, 10.0, 3.0, 2.0],
        [1.0, 10.0, 3.0, 30.0, 3.0],
        [3.0, 30.0, 3.0, 2.0],
    ]
