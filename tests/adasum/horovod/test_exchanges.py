"""alltoall, reducescatter, their forms for lists, and the questions for capabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import Group, run_threads, split_bounds
from tests.adasum.definition import tree
from tests.adasum.jobs import on_ranks


def rows_of(rank: int, rows: int) -> torch.Tensor:
    """Row i of rank r is [12 (10 r + i), -12]."""
    first = 12.0 * (10 * rank + torch.arange(rows).float())
    return torch.stack([first, torch.full_like(first, -12.0)], 1)


def exchange(rank: int, size: int) -> None:
    even = rows_of(rank, 2 * size)
    got = hvd.alltoall(even)
    want = torch.cat([rows_of(r, 2 * size)[2 * rank : 2 * rank + 2] for r in range(size)])
    assert torch.equal(got, want)
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(even, name="a"))[0], want)

    # Rank r sends r + q rows to rank q, and keeps three that go nowhere.
    def splits(r: int) -> list[int]:
        return [r + q for q in range(size)]

    def sent(r: int) -> torch.Tensor:
        return rows_of(r, sum(splits(r)) + 3)

    mine = sent(rank)
    before = mine.clone()
    for given in (splits(rank), torch.tensor(splits(rank))):
        got, counts = hvd.alltoall(mine, given, name="uneven")
        assert counts.tolist() == [r + rank for r in range(size)]
        assert counts.dtype == (torch.int64 if isinstance(given, torch.Tensor) else torch.int32)
        start = [sum(splits(r)[:rank]) for r in range(size)]
        want = torch.cat([sent(r)[start[r] : start[r] + r + rank] for r in range(size)])
        assert torch.equal(got, want)
    assert torch.equal(mine, before)
    # Another dtype and shape, and no rows at all.
    assert hvd.alltoall(torch.arange(size)).tolist() == [rank] * size
    assert hvd.alltoall(torch.empty(0, 3)).shape == (0, 3)


def scatter(rank: int, size: int) -> None:
    for rows in (2 * size + 1, 1, 0):
        cuts = split_bounds(rows, size)
        here = slice(cuts[rank], cuts[rank + 1])
        total = sum(rows_of(r, rows) for r in range(size))
        mine = rows_of(rank, rows)
        for op, want in ((hvd.Sum, total), (hvd.Average, total / size)):
            assert torch.equal(hvd.reducescatter(mine, op=op), want[here])
            assert torch.equal(hvd.reducescatter_async(mine, op=op).wait(), want[here])
            scaled = hvd.reducescatter(mine, op=op, prescale_factor=0.5, postscale_factor=4.0)
            assert torch.equal(scaled, 2.0 * want[here])
            many = hvd.grouped_reducescatter([mine, mine + 12.0], name="g", op=op)
            shift = 12.0 * (size if op is hvd.Sum else 1)
            assert torch.equal(many[1], want[here] + shift)
            scales = {"prescale_factor": 0.5, "postscale_factor": 4.0}
            many = hvd.grouped_reducescatter([mine, mine], op=op, **scales)
            assert torch.equal(many[1], 2.0 * want[here])
            handle = hvd.grouped_reducescatter_async([mine, mine], op=op)
            assert torch.equal(hvd.synchronize(handle)[1], want[here])
            scaled = hvd.grouped_reducescatter_async([mine, mine], op=op, **scales).wait()[1]
            assert torch.equal(scaled, 2.0 * want[here])
            assert hvd.poll(handle)
        assert torch.equal(mine, rows_of(rank, rows))
    mine = rows_of(rank, size)
    got = hvd.reducescatter(mine, op=hvd.Adasum)
    want = tree([rows_of(r, size).view(-1) for r in range(size)]).view(size, 2)[rank]
    torch.testing.assert_close(got[0].double(), want.double(), rtol=1e-5, atol=0.0)
    short = hvd.reducescatter(rows_of(rank, size), compression=hvd.Compression.bf16)
    assert short.dtype == torch.float32


def gather(rank: int, size: int) -> None:
    lists = [rows_of(rank, rank), torch.tensor([rank])]
    for got in (hvd.grouped_allgather(lists, "g"), hvd.grouped_allgather_async(lists).wait()):
        assert torch.equal(got[0], torch.cat([rows_of(r, r) for r in range(size)]))
        assert got[1].tolist() == list(range(size))


def everything(rank: int, size: int) -> None:
    for check in (exchange, scatter, gather):
        check(rank, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_alltoall_and_reducescatter_on_threads_are_right(size: int) -> None:
    run_threads(size, lambda group: everything(group.rank, size))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hvd.alltoall(torch.tensor(1.0)), ValueError, "first dimension"),
        (lambda: hvd.alltoall(torch.ones(3)), ValueError, "3 rows cannot be split equally"),
        (lambda: hvd.alltoall(torch.ones(3), [1]), ValueError, "splits must be 2 row counts"),
        (lambda: hvd.alltoall(torch.ones(3), [-1, 2]), ValueError, "splits must be 2 row counts"),
        (
            lambda: hvd.alltoall(torch.ones(3), [2, 2]),
            ValueError,
            "at most tensor's 3 rows, got 4",
        ),
        (lambda: hvd.alltoall(torch.ones(3), [0.5, 1.0]), ValueError, "splits must be ints"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), ValueError, "first dimension"),
        (lambda: hvd.reducescatter(torch.arange(2), op=hvd.Adasum), TypeError, "int64"),
        (
            lambda: hvd.reducescatter(torch.ones(2, requires_grad=True), op=hvd.Adasum),
            NotImplementedError,
            "op=Adasum",
        ),
    ],
)
@on_ranks(2)
def test_alltoall_and_reducescatter_with_bad_arguments_raise(
    group: Group, call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()
    group.barrier()


def test_capabilities_on_this_machine_are_told() -> None:
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    assert hvd.gloo_built() == torch.distributed.is_gloo_available()
    assert not hvd.gloo_enabled()
    assert run_threads(1, lambda group: hvd.gloo_enabled()) == [False]
    for answer in (hvd.mpi_threads_supported, hvd.ddl_built, hvd.ccl_built, hvd.mpi_built):
        assert answer() is False
    assert isinstance(hvd.rocm_built(), bool)


@on_ranks(2)
def test_grouped_functions_take_a_generator_and_an_empty_list(group: Group) -> None:
    for function in (hvd.grouped_allreduce, hvd.grouped_reducescatter, hvd.grouped_allgather):
        given: Any = (torch.full((2,), float(i)) for i in range(3))
        assert len(function(given)) == 3, function
        assert function([]) == [], function
