"""Adasum onto owners: to the bits of an all-reduce, for about half of its bytes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from adasum import Adasum, AdasumReducer
from collectives import FusedBuffer, Group, calls, reducers, run_threads
from collectives.schedules.partition import split_bounds
from collectives.schedules.topology import Topology
from tests.adasum.test_direct import BOUNDS, NARROW, check, defined, vectors
from tests.collectives.consistency.ranks import everywhere, run

UNWEIGHTED = AdasumReducer(weighted=False)
# Cut by slices of any number of ranks, with an empty one; together more than what goes by `rd`.
SHAPES = [(1000, 33), (0,), (), (40_001,), (7,), (12_345,)]


def draw(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if dtype.is_complex:
        return [
            torch.complex(one.float(), one.float().flip(0) if one.dim() else one.float())
            for one in drawn
        ]
    return [one.to(dtype) for one in drawn]


def fused(tensors: list[Tensor]) -> list[Tensor]:
    buffer = FusedBuffer(tensors)
    torch._foreach_copy_(buffer.tensors, tensors)
    # Kept as long as its tensors are.
    buffer.tensors[0].of = buffer  # type: ignore[attr-defined]
    return list(buffer.tensors)


def compare(group: Group, dtype: torch.dtype, op: AdasumReducer, *, fuse: bool) -> None:
    """What owners have is the all-reduce's, bit for bit, whoever the owners are."""
    size, options = group.size, {"postscale": 0.5}
    want = draw(group.rank, dtype)
    group.grouped_all_reduce(want, op, **options)
    shuffled = [random.Random(size).randrange(size) for _ in SHAPES]
    for owners in (None, shuffled, sorted(shuffled), [size - 1] * len(SHAPES)):
        got = fused(draw(group.rank, dtype)) if fuse else draw(group.rank, dtype)
        said = group.reduce_to_owners(got, op, owners=owners, **options)
        assert owners is None or said == owners
        mine = [i for i, owner in enumerate(said) if owner == group.rank]
        assert all(torch.equal(got[i], want[i]) for i in mine)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "size", [1, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))]
)
def test_owners_have_the_bits_of_an_all_reduce(
    size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)

    def job(group: Group) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            compare(group, dtype, Adasum, fuse=False)
        compare(group, torch.float32, UNWEIGHTED, fuse=True)
        compare(group, torch.float32, Adasum, fuse=True)
        # Of two dtypes at once, and little data, which goes by `rd`.
        mixed = [torch.ones(5) * group.rank, torch.ones(3, dtype=torch.float64)]
        group.reduce_to_owners(mixed, Adasum, owners=[0, size - 1])
        if group.rank == size - 1:
            assert mixed[1].tolist() == pytest.approx([1.0] * 3)

    run_threads(size, job)


@pytest.mark.parametrize("way", ["threads", "messages"])
def test_owners_on_nodes_have_the_bits_of_an_all_reduce(way: str) -> None:
    def job(group: Group) -> None:
        for dtype in (torch.float32, torch.float64):
            compare(group, dtype, Adasum, fuse=False)

    run(way, 8, job, topology=Topology(8, 4))


@everywhere
def test_a_request_onto_owners_may_be_repeated(way: str) -> None:
    owners = [2, 0, 1, 1, 0, 2]

    def job(group: Group) -> None:
        tensors = fused(draw(group.rank, torch.float32))
        request = group.reduce_to_owners_init(tensors, Adasum, owners=owners)
        for turn in range(3):
            mine = draw(group.rank + 3 * turn, torch.float32)
            torch._foreach_copy_(tensors, mine)
            group.grouped_all_reduce(mine, Adasum)
            request.start()
            assert request.wait() == owners
            for tensor, want, owner in zip(tensors, mine, owners, strict=True):
                assert owner != group.rank or torch.equal(tensor, want)

    run(way, 3, job)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_owners_and_slices_have_horovods_definition_within_100_eps(
    size: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of powers of two of ranks, where Horovod's pairs have no weights; by `direct` at any size."""
    monkeypatch.setattr(reducers, "_SMALL_TREE_BYTES", 0)
    if not shared:
        monkeypatch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)
    cases = [(k, d) for k in ("apart", "parallel", "orthogonal", "opposed 0.001") for d in NARROW]
    sizes = [high - low for low, high in itertools.pairwise(BOUNDS)]
    owners = [i % size for i in range(len(sizes))]

    def job(group: Group) -> list[tuple[list[Tensor], Tensor]]:
        answers = []
        for kind, dtype in cases:
            mine = vectors(kind, size, dtype)[group.rank]
            onto = [each.clone() for each in mine.split(sizes)]
            group.reduce_to_owners(onto, UNWEIGHTED, owners=owners)
            # One segment, whose elements are the third tensor's.
            third = mine[BOUNDS[2] : BOUNDS[3]].contiguous()
            answers.append((onto, group.reduce_scatter(third, UNWEIGHTED)))
        return answers

    results = run_threads(size, job)
    for number, (kind, dtype) in enumerate(cases):
        nodes = defined(vectors(kind, size, dtype), weighted=False)
        got = [results[owner][number][0][i] for i, owner in enumerate(owners)]
        check(torch.cat(got), nodes, (kind, dtype))
        got[2] = torch.cat([result[number][1] for result in results])
        check(torch.cat(got), nodes, (kind, dtype, "reduce_scatter"))


# On one level, on nodes of 2 and 4 ranks in levels, by pairs of vectors, and little data by `rd`.
@pytest.mark.parametrize("way", ["threads", "messages"])
@pytest.mark.parametrize(
    ("size", "local"),
    [
        (2, 2),
        (3, 3),
        (8, 4),
        *(pytest.param(*n, marks=pytest.mark.slow) for n in [(5, 5), (16, 2)]),
    ],
)
def test_a_reduce_scatter_is_the_slice_of_the_all_reduce(way: str, size: int, local: int) -> None:
    def job(group: Group) -> None:
        generator = torch.Generator().manual_seed(group.rank)
        drawn = torch.randn(70_001, 3, generator=generator, dtype=torch.float64)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for rows in (1, 70_001):
                mine, op = drawn[:rows].to(dtype), UNWEIGHTED if rows > 1 else Adasum
                want = group.all_reduce(mine.clone(), op, postscale=0.5)
                got = group.reduce_scatter(mine, op, by_rows=True, postscale=0.5)
                bounds = split_bounds(rows, size)
                assert torch.equal(got, want[bounds[group.rank] : bounds[group.rank + 1]])
                flat = group.reduce_scatter(mine.view(-1), op, postscale=0.5)
                bounds = split_bounds(3 * rows, size)
                whole = want.view(-1)[bounds[group.rank] : bounds[group.rank + 1]]
                assert torch.equal(flat, whole)

    run(way, size, job, topology=Topology(size, local))


def sent_by(group: Group, call: Any) -> dict[str, int]:
    """Return the bytes that a call sends, by the names of its steps."""
    sent: dict[str, int] = {}
    exchange = group.transport.exchange

    def counted(sends: Any, recvs: Any, step: str, timeout: float) -> None:
        for message in sends:
            sent[step] = sent.get(step, 0) + message.tensor.nbytes
        exchange(sends, recvs, step, timeout)

    group.transport.exchange = counted  # type: ignore[method-assign]
    try:
        call()
    finally:
        group.transport.exchange = exchange  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize(
    ("size", "local", "dtype"),
    [(3, 3, torch.float32), (8, 8, torch.float32), (8, 4, torch.float32), (4, 4, torch.float64)],
    ids=str,
)
def test_bytes_are_those_of_the_slices_and_what_owners_lack(
    size: int, local: int, dtype: torch.dtype
) -> None:
    """N (n - 1) for the slices of all ranks, at most N more for the owners; not 2 N (n - 1).

    So it is by pairs, as float64 goes, and in levels nearly.
    """
    numel = 64 * 1024 * size

    def job(group: Group) -> tuple[int, int, int]:
        halves = [torch.ones(numel // 2, dtype=dtype) for _ in range(2)]
        owners = [0, size - 1]
        made = (
            lambda: group.reduce_to_owners(halves, Adasum, owners=owners),
            lambda: group.grouped_all_reduce(halves, Adasum),
            lambda: group.reduce_scatter(torch.cat(halves), Adasum),
        )
        sent = [sent_by(group, call) for call in made]
        # Beside the vectors' parts there are tables, which all ways send alike.
        small = numel // size
        onto, whole, piece = (sum(n for n in each.values() if n > small) for each in sent)
        return onto, whole, piece

    found = zip(*run("messages", size, job, topology=Topology(size, local)), strict=True)
    onto, whole, piece = (sum(each) for each in found)
    nbytes = dtype.itemsize * numel
    slices = (size - 1) * nbytes
    assert whole == 2 * slices
    if size == 3:
        # The owners have their own slices, and rank r slice r.
        assert onto == slices + nbytes - 2 * nbytes // size
        assert piece == slices
    # The last of two levels exchanges whole slices, N more of all ranks together.
    most = slices + nbytes * (1 if local == size else 2)
    assert slices <= piece <= most
    assert slices < onto <= most
