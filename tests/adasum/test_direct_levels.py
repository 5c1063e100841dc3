"""Adasum by `direct` in levels, over nodes and many ranks: precise, and with equal bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from adasum import Adasum
from adasum.gram_reduction import add_gram_matrices
from collectives import Average, Group, Reducer, Sum, run_threads
from collectives.schedules import digits
from collectives.schedules.topology import Topology
from tests.adasum.test_direct import (
    BOUNDS,
    KINDS,
    NARROW,
    UNWEIGHTED,
    Node,
    bits,
    check,
    defined,
    joined,
    vectors,
)
from tests.collectives.consistency.ranks import WAYS, run, start_and_wait

# Ranks, and ranks a node: two levels of one exchange of tables each, and of two; folded ones.
QUICK = ((4, 2), (8, 4))
SLOW = ((8, 2), (16, 8), (16, 2), (17, 17), (24, 8), (32, 8), (32, 1))
NODES = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize(("size", "local"), NODES)
def test_levels_are_the_tree_of_longdoubles_within_100_eps(size: int, local: int) -> None:
    """Neighbours cancel, which meet in one level. Powers of two unweighted are Horovod's Adasum.

    Of 32 ranks results of levels cancel, too, if enough of each is left by its dtype.
    """
    kinds = KINDS if size < 32 else [kind for kind in KINDS if not kind.startswith("opposed")]
    cases = [(k, d, op) for k in kinds for d in NARROW for op in (Adasum, UNWEIGHTED)]
    # Of more ranks each dtype and operator with every fifth kind.
    cases = cases if size == 4 else cases[::5]

    def work(group: Group) -> list[Tensor]:
        answers = []
        for kind, dtype, op in cases:
            mine = vectors(kind, size, dtype)[group.rank].clone()
            answers.append(group.all_reduce(mine, op, algorithm="direct", segments=BOUNDS))
        return answers

    first, *others = run_threads(size, work, local_size=local)
    for number, (kind, dtype, op) in enumerate(cases):
        assert {bits(other[number]) for other in others} == {bits(first[number])}
        wanted = defined(vectors(kind, size, dtype), weighted=op.weighted)
        check(first[number], wanted, (kind, dtype, op))


def test_what_cancels_between_levels_loses_what_a_level_rounds() -> None:
    """Two nodes' results a and b, nearly opposed, are rounded to the dtype before they meet.

    By half an eps each. The pair's Adasum takes that to at most (1 + 1/2 + 1) times as much: 1/2
    each of both projections, and of both vectors' lengths, which are alike.
    """
    size = 4
    drawn = torch.randn(3, 1000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    for delta, dtype in itertools.product((1e-1, 1e-2, 1e-3), NARROW):
        inputs = [
            (sign * drawn[0] + delta * drawn[1 + r // 2]).to(dtype) for r, sign in enumerate(signs)
        ]

        def work(group: Group, inputs: Sequence[Tensor] = inputs) -> Tensor:
            return group.all_reduce(inputs[group.rank].clone(), Adasum, algorithm="direct")

        first, *others = run_threads(size, work, local_size=2)
        assert {bits(other) for other in others} == {bits(first)}
        values = [each.double().numpy().astype(np.longdouble) for each in inputs]
        leaves = [Node(value, 1, np.sqrt((value * value).sum())) for value in values]
        a, b = (joined(*pair, weighted=True) for pair in (leaves[:2], leaves[2:]))
        want = joined(a, b, weighted=True).value
        lengths = [np.sqrt((value * value).sum()) for value in (a.value, b.value, want)]
        eps = torch.finfo(dtype).eps
        error = first.double().numpy() - want
        bound = 2.5 * 0.5 * eps * (lengths[0] + lengths[1]) + eps * lengths[2]
        assert np.sqrt((error * error).sum()) <= bound, (delta, dtype)


@pytest.mark.parametrize(
    ("size", "local", "op", "steps"),
    [
        # Slices and tables in a node, slices across and tables in a node, the gather.
        (4, 2, Adasum, 5),
        (8, 4, Adasum, 5),
        # Four nodes exchange slices of slices, and send them back.
        (8, 2, Adasum, 6),
        # More than 8 ranks' tables travel by two digits.
        (16, 2, Adasum, 7),
        # In shared memory all operands meet at once; each rank makes the whole of a small sum.
        (8, 4, Sum, 0),
        (6, 2, Adasum, 1),
    ],
    ids=str,
)
def test_steps_of_levels_are_their_exchanges_and_their_tables(
    size: int, local: int, op: Reducer, steps: int
) -> None:
    def work(group: Group) -> None:
        mine = vectors("common", size, torch.float32)[group.rank].clone()
        before = group.transport.steps
        group.all_reduce(mine, op, algorithm="direct", segments=BOUNDS)
        assert group.transport.steps - before == steps

    run_threads(size, work, local_size=local)


def test_levels_have_the_same_bits_by_every_way_in_every_run_and_as_requests() -> None:
    topology = Topology(4, 2)

    def work(group: Group) -> list[bytes]:
        answers = []
        for dtype in (torch.bfloat16, torch.complex64):
            for kind in ("common", "opposed 1e-06"):
                real = dtype.to_real() if dtype.is_complex else dtype
                vector = vectors(kind, 4, real)[group.rank]
                if dtype.is_complex:
                    vector = torch.complex(vector, vector.flip(0))
                mine, again = vector.clone(), vector.clone()
                group.all_reduce(mine, Adasum, algorithm="direct", segments=BOUNDS)
                start_and_wait(
                    group.all_reduce_init(again, Adasum, algorithm="direct", segments=BOUNDS)
                )
                own = digits.all_reduce(4, (2, 2))
                other = group.run(own, vector.clone(), Adasum, segments=BOUNDS)
                answers.append(bits(mine))
                assert answers[-1] == bits(again) == bits(other)
        return answers

    found = [each for way in WAYS for each in run(way, 4, work, topology=topology)]
    assert all(each == found[0] for each in found)


def test_tables_between_nodes_that_average_inside_travel_by_digits() -> None:
    """Of three nodes of four ranks, each of which owns a quarter of its node's average."""
    inputs = vectors("common", 12, torch.float32)

    def work(group: Group) -> list[Tensor]:
        names = ("rechd/direct", "rechd/rd")
        return [group.all_reduce(inputs[group.rank].clone(), Adasum, algorithm=n) for n in names]

    (first, other), *rest = run_threads(12, work, local_size=4)
    assert {bits(one) for one, _ in rest} == {bits(first)}
    # Each of both is within the contract's 100 eps of the tree.
    assert (first - other).norm() <= 200 * torch.finfo(torch.float32).eps * other.norm()


@pytest.mark.parametrize("numel", [0, 1, 3, 7])
def test_fewer_elements_than_ranks_are_the_tree(numel: int) -> None:
    inputs = [vector[200:][:numel] for vector in vectors("common", 8, torch.float32)]

    def work(group: Group) -> list[Tensor]:
        names = ("direct", "direct#3", "rd")
        return [group.all_reduce(inputs[group.rank].clone(), Adasum, algorithm=n) for n in names]

    for one, shards, other in run_threads(8, work, local_size=2):
        assert torch.equal(one, shards)
        # Each of both is within the contract's 100 eps of the tree.
        assert (one - other).norm() <= 200 * torch.finfo(torch.float32).eps * other.norm()


@pytest.mark.parametrize("dtype", NARROW)
def test_a_node_whose_vectors_leave_nothing_is_the_identity(dtype: torch.dtype) -> None:
    """Of it float64 coefficients leave some 2^-53, which would have a direction in the next level.

    The other node's answer is that of its own ranks.
    """
    a, b, *others = vectors("apart", 6, dtype)

    def work(group: Group) -> Tensor:
        mine = [a, b, -a, -b, *others][group.rank].clone()
        return group.all_reduce(mine, Adasum, algorithm="direct", segments=BOUNDS)

    first, *rest = run_threads(8, work, local_size=4)
    assert {bits(each) for each in rest} == {bits(first)}
    check(first, defined(others), dtype)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_segment(poison: float) -> None:
    """Through tables that are added up on the way, too."""

    def work(group: Group) -> None:
        clean, poisoned = (vectors("common", 16, torch.float32)[group.rank] for _ in range(2))
        if group.rank == 11:
            poisoned[500] = poison
        for tensor in (clean, poisoned):
            group.all_reduce(tensor, Adasum, algorithm="direct", segments=BOUNDS)
        assert poisoned[130:900].isnan().all()
        for here in (slice(130), slice(900, None)):
            assert torch.equal(poisoned[here], clean[here])

    run_threads(16, work, local_size=2)


def test_a_joined_rank_counts_and_is_the_identity() -> None:
    (vector,) = vectors("apart", 1, torch.float32)

    def work(group: Group) -> None:
        if group.rank == 1:
            group.join((Adasum,))
            return
        mine = (1 + group.rank) * vector
        group.all_reduce(mine, Adasum, algorithm="direct", segments=BOUNDS)
        # (1 and nothing, then 3 and 4): (1 + 3.5) / 2, whose levels round to the dtype.
        assert ((mine - vector * 2.25).abs() <= 3 * 2.0**-23 * mine.abs()).all()
        group.join((Adasum,))

    run("threads", 4, work, topology=Topology(4, 2))


def test_average_over_nodes_is_one_pass_in_rank_order() -> None:
    def work(group: Group) -> None:
        inputs = vectors("common", 4, torch.float16)
        answers = [
            group.all_reduce(inputs[group.rank].clone(), Average, algorithm=name)
            for name in ("direct", "direct#2", "psgpu#2")
        ]
        assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])

    run_threads(4, work, local_size=2)


@pytest.mark.parametrize("count", [2, 4, 7, 8])
def test_sums_of_gram_matrices_have_95_bits(count: int) -> None:
    """Of matrices whose high parts cancel, beside the largest of them; zeros and NaN as they are.

    What is left of high parts is at most a unit of their scale, 2^-52 · 2 count times the largest,
    and each of the count additions rounds by 2^-53 of what they make.
    """
    drawn = torch.randn(count, 40, 3, 3, generator=torch.Generator().manual_seed(3)).double()
    high = drawn * 10.0 ** torch.linspace(-60, 60, 40, dtype=torch.float64)[:, None, None]
    high[1:, :10] = -high[0, :10] / (count - 1)
    low = high * 2.0**-54 * torch.randn(count, 40, 3, 3, dtype=torch.float64)
    tables = torch.stack([high, low], -1)
    tables[:, 20] = 0.0
    tables[0, 30, 0, 0, 0] = float("nan")
    tables[1, 31, 0, 0, 0] = float("inf")
    total = add_gram_matrices(tables)
    finite = [index for index in range(40) if index not in (30, 31)]
    for index, i, j in itertools.product(finite, range(3), range(3)):
        entries = tables[:, index, i, j]
        want = sum(map(Fraction, entries.flatten().tolist()))
        error = abs(sum(map(Fraction, total[index, i, j].tolist())) - want)
        largest = Fraction(float(entries[:, 0].abs().max()))
        assert error <= count * count * count * largest / 2**103
    assert not total[20].any()
    assert not total[30, 0, 0].isfinite().any() and not total[31, 0, 0].isfinite().any()
    assert total[30, 1].isfinite().all()
