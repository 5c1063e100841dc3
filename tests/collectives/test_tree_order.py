"""order="tree": every element is the balanced tree over the ranks, whatever carries it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import collectives
from collectives import (
    Average,
    Group,
    Needs,
    Reducer,
    Sum,
    split_bounds,
)
from collectives.schedules import halving, ring
from collectives.schedules.algorithm import Order
from collectives.schedules.registry import carriers
from tests.collectives.consistency.ranks import everywhere, run, run_over, start_and_wait
from tests.collectives.transport.thread_ranks import NO_MEMFD, connect

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IN_PAIRS = carriers(Needs.BALANCED_TREE)
AT_ONCE = carriers(Needs.BALANCED_TREE | Needs.ALL_OPERANDS)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit; a NaN is a NaN, whatever its payload."""
    nan = one.isnan() & other.isnan()
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return bool(((one.contiguous().view(raw) == other.contiguous().view(raw)) | nan).all())


def reference(vectors: Sequence[Tensor], op: Reducer, accumulate: torch.dtype | None) -> Tensor:
    """The tree by torch's own additions of two, each rounded to the dtype or not at all."""
    dtype = vectors[0].dtype

    def total(tree: Any) -> Tensor:
        if isinstance(tree, int):
            return vectors[tree].to(accumulate or dtype)
        left, right = map(total, tree)
        return left + right

    answer = total(Order.BALANCED.tree(range(len(vectors)))).to(dtype)
    return answer.div_(len(vectors)) if op is Average else answer


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers over many magnitudes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(numel, generator=generator, dtype=torch.float64).mul_(2).exp_()
    return torch.randn(numel, generator=generator, dtype=torch.float64).mul_(spread).to(dtype)


class Case:
    """A call that reduces vectors of some ranks, seeded: the same on each of them."""

    def __init__(self, seed: int, size: int) -> None:
        draw = random.Random(seed)
        self.dtype = draw.choice(FLOATS)
        self.op = draw.choice((Sum, Average))
        wide = self.dtype != torch.float64 and draw.random() < 0.3
        self.accumulate = torch.float32 if wide else None
        self.numel = draw.choice((1, 3, draw.randrange(1, 200), draw.randrange(200, 9000)))
        self.offset = draw.randrange(9)
        self.algorithm = draw.choice(("auto", *(AT_ONCE if wide else (*IN_PAIRS, "rd:64:rechd"))))
        self.kind = draw.choice(KINDS)
        self.pieces = draw.randrange(1, 5)
        self.last = draw.randrange(size)
        self.vectors = [values(self.numel, self.dtype, 97 * seed + rank) for rank in range(size)]

    @property
    def options(self) -> dict[str, Any]:
        return {"order": "tree", "accumulate": self.accumulate}

    @property
    def where(self) -> str:
        return f"{self.kind.__name__} {vars(self) | {'vectors': None}}"

    def mine(self, group: Group) -> Tensor:
        """This rank's vector, somewhere in a larger memory."""
        memory = torch.full((self.numel + 17,), float("nan"), dtype=self.dtype)
        memory[self.offset :][: self.numel] = self.vectors[group.rank]
        return memory[self.offset :][: self.numel]

    def parts(self, vector: Tensor) -> list[Tensor]:
        return list(vector.tensor_split(self.pieces))


def by_all_reduce(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    """Each answer with its first element."""
    got = group.all_reduce(case.mine(group), case.op, algorithm=case.algorithm, **case.options)
    return [(got, 0)]


def by_request(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    vector = case.mine(group)
    request = group.all_reduce_init(vector, case.op, algorithm=case.algorithm, **case.options)
    sent = vector.clone()
    for _ in range(2):
        vector.copy_(sent)
        request.start()
        request.wait()
    return [(vector, 0)]


def by_groups(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    """Packed, or one by one: also where parts lie in memory of their own."""
    parts = case.parts(case.mine(group))
    if case.offset % 2:
        parts = [part.clone() for part in parts]
    options = {**case.options, "algorithm": case.algorithm, "packed": case.offset % 3 == 0}
    got = group.grouped_all_reduce(parts, case.op, **options)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.numel())
    return list(zip(got, starts, strict=False))


def by_reduce_scatter(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    got = group.reduce_scatter(case.mine(group), case.op, **case.options)
    return [(got, split_bounds(case.numel, group.size)[group.rank])]


def by_reduce(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    got = group.reduce(case.mine(group), case.last, case.op, **case.options)
    return [(got, 0)] if group.rank == case.last else []


def by_owners(group: Group, case: Case) -> list[tuple[Tensor, int]]:
    parts = case.parts(case.mine(group))
    given = [(case.last + i) % group.size for i in range(len(parts))] if case.offset % 2 else None
    owners = group.reduce_to_owners(parts, case.op, owners=given, **case.options)
    found, start = [], 0
    for part, owner in zip(parts, owners, strict=True):
        if owner == group.rank:
            found.append((part, start))
        start += part.numel()
    return found


KINDS: tuple[Callable[[Group, Case], list[tuple[Tensor, int]]], ...] = (
    *(by_all_reduce, by_all_reduce, by_request),
    *(by_groups, by_reduce_scatter, by_reduce, by_owners),
)


def run_cases(group: Group, seeds: Sequence[int]) -> int:
    """Compare every case's answer with the reference; return how many elements were compared."""
    compared = 0
    for seed in seeds:
        case = Case(seed, group.size)
        want = reference(case.vectors, case.op, case.accumulate)
        for got, start in case.kind(group, case):
            assert same_bits(got, want[start : start + got.numel()]), case.where
            compared += got.numel()
    return compared


SOME = {1: 20, 2: 60, 3: 60, 4: 60, 5: 40, 8: 40, 13: 20}


@pytest.mark.parametrize("size", SOME)
def test_every_element_is_the_balanced_tree(size: int) -> None:
    compared = collectives.run_threads(size, lambda group: run_cases(group, range(SOME[size])))
    assert sum(compared) > 1000


@pytest.mark.parametrize("kind", [pytest.param("shm", marks=NO_MEMFD), "messages"])
@pytest.mark.parametrize("size", [2, 5])
def test_every_transport_makes_the_same_tree(kind: str, size: int) -> None:
    def job(group: Group) -> int:
        return run_cases(group, range(1000, 1040))

    assert all(run_over(connect(size, kind), job, 60.0))


def test_two_levels_that_make_another_order_are_refused_with_the_tree() -> None:
    def job(group: Group) -> None:
        with pytest.raises(ValueError, match=r"rechd/rd.*needs every element as \(\("):
            group.all_reduce(torch.ones(3), order="tree", algorithm="rechd/rd")
        assert group.all_reduce(torch.ones(3), order="tree")[0] == 6

    collectives.run_threads(6, job, local_size=3)


def test_rank_that_has_joined_adds_a_leaf_of_zeros() -> None:
    def job(group: Group) -> None:
        if group.rank == 2:
            group.join()
            return
        for accumulate in (None, torch.float32):
            vectors = [values(500, torch.bfloat16, rank) for rank in range(4)]
            vectors[2].zero_()
            for op in (Sum, Average):
                mine = vectors[group.rank].clone()
                got = group.all_reduce(mine, op, order="tree", accumulate=accumulate)
                assert same_bits(got, reference(vectors, op, accumulate))
        group.join()

    collectives.run_threads(4, job)


def test_schedules_of_users_run_where_they_are_proved_to_be_the_tree() -> None:
    def job(group: Group) -> None:
        vectors = [values(50, torch.float16, rank) for rank in range(3)]
        mine = vectors[group.rank].clone()
        got = group.run(halving.doubling(3), mine, order="tree")
        assert same_bits(got, reference(vectors, Sum, None))
        with pytest.raises(ValueError, match=r"needs every element as \(\(0·1\)·2\)"):
            group.run(ring.all_reduce(3), mine, order="tree")

    collectives.run_threads(3, job)


def in_float32(vectors: Sequence[Tensor], op: Reducer) -> Tensor:
    """The tree in float32 of vectors in a narrower dtype, never rounded to that."""
    return reference([vector.float() for vector in vectors], op, None)


@everywhere
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduce_scatter_to_float32_does_not_round_its_sums(
    way: str, size: int, dtype: torch.dtype
) -> None:
    def job(group: Group) -> None:
        for numel, op in ((3, Sum), (1001, Average), (1001, Sum), (70_001, Average)):
            vectors = [values(numel, dtype, 10 * numel + rank) for rank in range(size)]
            bounds = split_bounds(numel, size)
            low, high = bounds[group.rank : group.rank + 2]
            want = in_float32(vectors, op)[low:high]
            mine, out = vectors[group.rank].clone(), torch.full((high - low,), torch.nan)
            got = group.reduce_scatter(mine, op, out=out, order="tree")
            assert got is out and same_bits(out, want)
            assert same_bits(mine, vectors[group.rank])
            # Each of up to n - 1 additions and a division rounds once, to half a unit of float32.
            exact = torch.stack(vectors).double().sum(0)[low:high] / (size if op is Average else 1)
            reach = torch.stack(vectors).double().abs().sum(0)[low:high]
            eps = torch.finfo(torch.float32).eps
            assert bool(((out - exact).abs() <= size * eps / 2 * reach).all())
            request = group.reduce_scatter_init(mine, op, out=out, order="tree")
            for _ in range(2):
                out.fill_(torch.nan)
                assert same_bits(start_and_wait(request), want)
        rows = values(6 * size, dtype, group.rank).view(2 * size, 3)
        out = torch.empty(2, 3)
        group.reduce_scatter(rows, by_rows=True, out=out, order="tree", postscale=0.5)
        vectors = [values(6 * size, dtype, rank) for rank in range(size)]
        start = 6 * group.rank
        assert same_bits(out.flatten(), in_float32(vectors, Sum)[start : start + 6] / 2)

    run(way, size, job)


def test_reduce_scatter_to_float32_on_one_rank_is_a_mismatch() -> None:
    def job(group: Group) -> None:
        halves = torch.ones(4, dtype=torch.bfloat16)
        out = torch.empty(2, dtype=torch.float32 if group.rank else torch.bfloat16)
        with pytest.raises(collectives.CollectiveMismatchError, match=r"accumulate=torch\.float32"):
            group.reduce_scatter(halves, out=out, order="tree")

    collectives.run_threads(2, job)


def test_integers_and_complex_numbers_have_the_order_too() -> None:
    def job(group: Group) -> None:
        assert group.all_reduce(torch.tensor([group.rank, 7]), order="tree").tolist() == [10, 35]
        parts = [
            torch.complex(values(99, torch.float32, 2 * rank), values(99, torch.float32, rank))
            for rank in range(group.size)
        ]
        want = reference([torch.view_as_real(each).flatten() for each in parts], Sum, None)
        for algorithm in ("rd", "direct"):
            mine = parts[group.rank].clone()
            got = group.all_reduce(mine, order="tree", algorithm=algorithm)
            assert same_bits(torch.view_as_real(got).flatten(), want)

    collectives.run_threads(5, job)
