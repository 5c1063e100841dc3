"""Adasum weighs its operands by the ranks behind them: by every algorithm, for every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum import Adasum, AdasumReducer
from collectives import CollectiveMismatchError, Group, calls, run_threads
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.schedules import halving
from collectives.schedules.algorithm import Order
from collectives.schedules.registry import ALGORITHMS, ORDERED
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.verify import with_leaves
from tests.adasum.definition import line, relative_error, tolerance, tree
from tests.collectives.schedules.simulation import silent

UNWEIGHTED = AdasumReducer(weighted=False)
# Three segments: parallel vectors, orthogonal ones and ones that are neither. None of the numbers
# is a multiple of a number of ranks, so pieces cut segments.
COUNT, PER_RANK = 101, 7
# Powers of two and others, and in `make test-slow` all of them.
QUICK = {1, 2, 3, 5, 6, 7, 8, 17}
SIZES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 18)]
NODES = [(4, 2), (6, 2), (6, 3), (12, 4), (15, 3)]
TWO_LEVEL = ["xring/rd", "rechd/vhdd", "rechd/direct", "psgpu/xring", "xring/psgpu#2"]


def share(rank: int) -> float:
    """How long a rank's parallel vector is: between 1 and 2, so that no sum cancels."""
    return 1.0 + (rank * 0.618) % 1.0


def inputs(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    common = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    apart = torch.randn(PER_RANK * size, generator=generator, dtype=torch.float64)
    vectors = []
    for rank in range(size):
        own = torch.zeros_like(apart)
        own[PER_RANK * rank : PER_RANK * (rank + 1)] = apart[PER_RANK * rank :][:PER_RANK]
        mixed = common + torch.randn(COUNT, generator=generator, dtype=torch.float64)
        vectors.append(torch.cat([share(rank) * common, own, mixed]))
    return vectors


def bounds(size: int) -> tuple[int, ...]:
    return 0, COUNT, COUNT + PER_RANK * size, 2 * COUNT + PER_RANK * size


def algorithms(size: int) -> list[str]:
    """Every one, with shards where they make another schedule."""
    names = [*ORDERED, "auto", "rd#3", "vhdd#2", "bruck#2"]
    return names if size == 1 else [*names, "xring#2", f"psgpu#{size}"]


def defined(name: str) -> Callable[..., Tensor]:
    (spec,) = parse_all_reduce_spec(name)
    in_line = spec.outer != "auto" and ALGORITHMS[spec.outer].order is Order.LINE
    return line if in_line else tree


def check(answer: Tensor, name: str, leaves: Sequence[Tensor], size: int, mean: float) -> None:
    """One algorithm's answer against the property and the definition; `leaves` in float64."""
    cuts = bounds(size)
    parallel, apart, _ = answer.split([b - a for a, b in pairwise(cuts)])
    common = inputs(size)[0][:COUNT] / share(0)
    assert relative_error(parallel, mean * common) <= tolerance(torch.float64), name
    if "/" not in name:
        # Of orthogonal vectors no coefficient is other than 1.
        assert torch.equal(apart, sum(inputs(size))[cuts[1] : cuts[2]]), name
    want = defined(name)(leaves, cuts)
    assert relative_error(answer, want) <= tolerance(torch.float64), name


def reduced(size: int, names: Sequence[str], op: AdasumReducer, local_size: int = 1) -> list[Any]:
    """All ranks' answers by each algorithm."""
    vectors = inputs(size)

    def work(group: Group) -> list[Tensor]:
        mine = [vectors[group.rank].clone() for _ in names]
        for tensor, name in zip(mine, names, strict=True):
            group.all_reduce(tensor, op, algorithm=name, segments=bounds(size))
        return mine

    return run_threads(size, work, local_size=local_size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_messages", [False, True])
def test_parallel_vectors_weigh_one_nth_each_and_orthogonal_ones_sum(
    size: int, by_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_messages:
        monkeypatch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)
    names = algorithms(size)
    results = reduced(size, names, Adasum, local_size=size)
    mean = sum(map(share, range(size))) / size
    for name, *answers in zip(names, *results, strict=True):
        assert all(torch.equal(answer, answers[0]) for answer in answers), name
        check(answers[0], name, inputs(size), size, mean)


@pytest.mark.parametrize(("size", "local_size"), NODES)
def test_parallel_vectors_on_two_levels_weigh_one_nth_each(size: int, local_size: int) -> None:
    results = reduced(size, TWO_LEVEL, Adasum, local_size)
    mean = sum(map(share, range(size))) / size
    nodes = [
        torch.stack(inputs(size)[low : low + local_size]).mean(0)
        for low in range(0, size, local_size)
    ]
    for name, *answers in zip(TWO_LEVEL, *results, strict=True):
        assert all(torch.equal(answer, answers[0]) for answer in answers), name
        check(answers[0], name, nodes, size, mean)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_unweighted_pairs_count_alike_whatever_is_behind_them(size: int) -> None:
    names = algorithms(size)
    for name, answer in zip(
        names, reduced(size, names, UNWEIGHTED, local_size=size)[0], strict=True
    ):
        want = defined(name)(inputs(size), bounds(size), weighted=False)
        assert relative_error(answer, want) <= tolerance(torch.float64), name


@pytest.mark.parametrize("size", [2, 4, 8])
def test_weighted_and_not_of_a_power_of_two_have_equal_bits(size: int) -> None:
    names = ["rd", "vhdd", "rechd#3", "auto"]
    one, other = (reduced(size, names, op, size) for op in (Adasum, UNWEIGHTED))
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["all_reduce", "all_reduce_init"])
def test_ranks_that_differ_in_weighted_get_an_error_that_says_so(kind: str) -> None:
    def work(group: Group) -> str:
        tensor = torch.ones(4)
        with pytest.raises(CollectiveMismatchError) as caught:
            getattr(group, kind)(tensor, Adasum if group.rank else UNWEIGHTED)
        assert torch.equal(tensor, torch.ones(4))
        assert group.all_reduce(tensor, Adasum).sum() == 4.0
        return str(caught.value)

    messages = run_threads(3, work)
    assert len({*messages}) == 1
    assert "op=Adasum(weighted=False)" in messages[0] and "with op=Adasum" in messages[0]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("method", ["gradient", "delta"])
def test_optimizer_steps_by_weighted_and_by_unweighted_adasum(method: str, weighted: bool) -> None:
    """SGD of rate 1 takes the gradients' Adasum either way; "xring" on four ranks is a line."""
    vectors = inputs(4)

    def work(group: Group) -> Tensor:
        parameter = torch.nn.Parameter(torch.zeros_like(vectors[0]))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            op=Adasum,
            algorithm="xring",
            weighted=weighted,
            method=method,
        )
        (parameter * vectors[group.rank]).sum().backward()
        optimizer.step()
        return -parameter.detach()

    want = line(vectors, weighted=weighted)
    for answer in run_threads(4, work):
        assert relative_error(answer, want) <= tolerance(torch.float64)


def test_a_schedule_of_ones_own_is_weighed_by_what_verify_derives() -> None:
    """A chain with rank 1 first: it reads as ((1 0) 2), whose weights no step says."""

    def steps(rank: int) -> list[Step]:
        out, into = Step(sends=(Transfer(0, 0, 1),)), Action.REDUCE_LEFT
        return [
            [Step(recvs=(Transfer(1, 0, 1, into),), group=(0,)), Step((Transfer(2, 0, 1),)),
             Step(recvs=(Transfer(2, 0, 1),))],
            [out, Step(), Step(recvs=(Transfer(2, 0, 1),))],
            [Step(), Step(recvs=(Transfer(0, 0, 1, into),), group=(2,)),
             Step((Transfer(0, 0, 1), Transfer(1, 0, 1)))],
        ][rank]  # fmt: skip

    schedule = Schedule("chain", 3, 1, Collective.ALL_REDUCE, steps)
    vectors = inputs(3)

    counted = with_leaves(schedule)

    def run(group: Group) -> Tensor:
        call = CallContext(group.transport, "a chain", 30.0, Workspace())
        mine = vectors[group.rank].clone()
        execute(counted, mine, Adasum, call)
        return mine

    want = line([vectors[1], vectors[0], vectors[2]])
    for answer in run_threads(3, run):
        assert relative_error(answer, want) <= tolerance(torch.float64)


def test_a_schedule_that_does_not_say_its_weights_is_refused() -> None:
    schedule = silent(halving.doubling(2))

    def run(group: Group) -> None:
        call = CallContext(group.transport, "a call", 30.0, Workspace())
        execute(schedule, torch.ones(4), Adasum, call)

    with pytest.raises(ValueError, match=r"step 0 \(rd\) of a call does not say how many ranks"):
        run_threads(2, run)


def test_a_joined_rank_counts_and_its_zeros_are_the_identity() -> None:
    """Rank 2 of a line of three ranks stands beside two, one of which has joined."""
    (vector,) = inputs(1)
    ops = (Adasum, UNWEIGHTED)

    def work(group: Group) -> list[Tensor]:
        if group.rank == 1:
            group.join(ops)
            return []
        found = [group.all_reduce(vector * (1 + group.rank), op, algorithm="xring") for op in ops]
        group.join(ops)
        return found

    weighted, plain = run_threads(3, work)[0]
    assert relative_error(weighted, vector * (2 * 1 + 3) / 3) <= tolerance(torch.float64)
    assert relative_error(plain, vector * (1 + 3) / 2) <= tolerance(torch.float64)
