"""Adasum by `direct`, one Gram matrix a segment, also over nodes: precise whatever cancels, with
equal bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from adasum import Adasum, AdasumReducer
from collectives import Group, Operands, Reducer, Sum, run_threads
from collectives.reducers import Piece
from collectives.schedules import direct
from collectives.schedules.algorithm import Order
from collectives.schedules.halving import balanced_tree
from collectives.schedules.topology import Topology
from tests.adasum.jobs import on_ranks
from tests.collectives.consistency.ranks import WAYS, everywhere, run, start_and_wait
from tests.collectives.operators import Longest

UNWEIGHTED = AdasumReducer(weighted=False)
NARROW = (torch.float16, torch.bfloat16, torch.float32)
# 1003 is no multiple of any number of ranks: cuts fall inside segments. There is an empty one, one
# of one element, and one longer than most slices.
BOUNDS = (0, 1, 1, 130, 900, 1003)
# (ranks, ranks of a node). Powers of two and others, folded ones too; at night all of them.
QUICK = {1, 2, 3, 4, 5, 8}
NIGHT = pytest.mark.slow
SIZES = [pytest.param(n, n, marks=() if n in QUICK else NIGHT) for n in range(1, 18)]
MORE_NODES = ((8, 2), (16, 8), (16, 2), (24, 8), (32, 8), (32, 1))
NODES = [(4, 2), (8, 4), *(pytest.param(*each, marks=NIGHT) for each in MORE_NODES)]
OPPOSED = [f"opposed {10.0**-power:g}" for power in range(1, 8)]
KINDS = ["common", "apart", "parallel", "orthogonal", "tiny", "huge", "zeros", "half", *OPPOSED]


def vectors(kind: str, size: int, dtype: torch.dtype) -> list[Tensor]:
    """One a rank, the same in every run."""
    generator = torch.Generator().manual_seed(31 * size)
    draw = torch.randn(size + 1, BOUNDS[-1], generator=generator, dtype=torch.float64)
    common, own = draw[0], draw[1:]
    lengths = 1.0 + 0.3 * torch.arange(size, dtype=torch.float64)[:, None]
    signs = 1.0 - 2.0 * (torch.arange(size, dtype=torch.float64) % 2)[:, None]
    mask = torch.arange(BOUNDS[-1]) % size == torch.arange(size)[:, None]
    # Of float16 far enough from the ends of its range that the answer is a normal number.
    small, large = (1e-2, 3e3) if dtype == torch.float16 else (1e-30, 1e37)
    found = {
        "common": common + own,
        "apart": own,
        "parallel": lengths * common,
        "orthogonal": own * mask,
        "tiny": small * (common + own),
        "huge": large * (common + own),
        # Opposed on some slices, where nothing is left, and short and apart on others.
        "half": torch.where(torch.arange(BOUNDS[-1]) < 500, signs * common, 1e-3 * own),
        "zeros": own * (torch.arange(size) % 3 != 1)[:, None],
    }
    if kind in found:
        return list(found[kind].to(dtype))
    return list((signs * common + float(kind.split()[1]) * own).to(dtype))


class Node(NamedTuple):
    """A vector of the tree, its ranks, and the sum of |c_i| |g_i| over the vectors that make it."""

    value: np.ndarray
    ranks: int
    reach: np.longdouble


def joined(a: Node, b: Node, *, weighted: bool) -> Node:
    """adasum(a, b) of one segment; what is nothing but longdouble's rounding is a zero vector."""
    p, q = (a.ranks, b.ranks) if weighted else (1, 1)
    dot = (a.value * b.value).sum()
    factors = []
    for node, share in ((a, np.longdouble(p) / (p + q)), (b, np.longdouble(q) / (p + q))):
        square = (node.value * node.value).sum()
        zero = square < 1.5e-154 or square < (2.0**-50 * node.reach) ** 2
        factors.append(np.longdouble(1) if zero else 1 - share * dot / square)
    left, right = factors
    reach = abs(left) * a.reach + abs(right) * b.reach
    return Node(left * a.value + right * b.value, a.ranks + b.ranks, reach)


def defined(inputs: Sequence[Tensor], *, weighted: bool = True) -> list[Node]:
    """The tree's Adasum of each segment."""

    def join(tree: object, leaves: Sequence[Node]) -> Node:
        if isinstance(tree, int):
            return leaves[tree]
        left, right = tree  # type: ignore[misc]
        return joined(join(left, leaves), join(right, leaves), weighted=weighted)

    answer = []
    for low, high in itertools.pairwise(BOUNDS):
        values = [each[low:high].double().numpy().astype(np.longdouble) for each in inputs]
        leaves = [Node(value, 1, np.sqrt((value * value).sum())) for value in values]
        answer.append(join(Order.BALANCED.tree(range(len(inputs))), leaves))
    return answer


def check(answer: Tensor, nodes: Sequence[Node], about: object) -> None:
    """The contract's 100 eps of each segment, and half a spacing where results are subnormal.

    What is left where all cancels is the rounding of float64 coefficients, half an eps of each.
    """
    info = torch.finfo(answer.dtype)
    for node, (low, high) in zip(nodes, itertools.pairwise(BOUNDS), strict=True):
        want = node.value
        error = answer[low:high].double().numpy() - want
        floor = 0.5 * info.smallest_normal * info.eps * np.sqrt(max(high - low, 1))
        bound = 100 * info.eps * np.sqrt((want * want).sum()) + floor + 2.0**-53 * node.reach
        assert np.sqrt((error * error).sum()) <= bound, (about, low, high)


def bits(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _reduced_directly(group: Group, cases: list[Any]) -> list[Tensor]:
    """Each case's vectors, a (kind, dtype, operator), reduced by `direct`."""
    answers = []
    for kind, dtype, op in cases:
        mine = vectors(kind, group.size, dtype)[group.rank].clone()
        answers.append(group.all_reduce(mine, op, algorithm="direct", segments=BOUNDS))
    return answers


CASES = [(k, d, op) for k in KINDS for d in NARROW for op in (Adasum, UNWEIGHTED)]


@pytest.mark.usefixtures("by_messages")
@pytest.mark.parametrize(("size", "local"), [*SIZES, *NODES])
def test_direct_is_the_tree_of_longdoubles_within_100_eps_whatever_cancels(
    size: int, local: int
) -> None:
    """Of ranks on nodes powers of two unweighted are Horovod's Adasum."""
    # Of more ranks on nodes each with every fifth kind.
    cases = CASES if local == size or size == 4 else CASES[::5]
    run = partial(_reduced_directly, cases=cases)
    first, *others = run_threads(size, run, local_size=local)
    for number, (kind, dtype, op) in enumerate(cases):
        assert {bits(other[number]) for other in others} <= {bits(first[number])}
        wanted = defined(vectors(kind, size, dtype), weighted=op.weighted)
        check(first[number], wanted, (kind, dtype, op))


@pytest.mark.parametrize(
    ("size", "topology"), [(3, None), (4, None), (5, None), (4, Topology(4, 2))], ids=str
)
def test_direct_has_the_same_bits_by_every_way_in_every_run_and_as_a_request(
    size: int, topology: Topology | None
) -> None:
    def work(group: Group) -> list[bytes]:
        answers = []
        for dtype in (*NARROW, torch.complex64):
            for kind in ("common", "opposed 1e-06"):
                real = dtype.to_real() if dtype.is_complex else dtype
                vector = vectors(kind, size, real)[group.rank]
                if dtype.is_complex:
                    vector = torch.complex(vector, vector.flip(0))
                mine, again = vector.clone(), vector.clone()
                options: Any = {"algorithm": "direct", "segments": BOUNDS}
                group.all_reduce(mine, Adasum, **options)
                start_and_wait(group.all_reduce_init(again, Adasum, **options))
                own = direct.all_reduce(size)
                other = group.run(own, vector.clone(), Adasum, segments=BOUNDS)
                answers.append(bits(mine))
                assert answers[-1] == bits(again) == bits(other)
        return answers

    options = {"topology": topology} if topology else {}
    found = [each for way in WAYS for each in run(way, size, work, **options)]
    assert all(each == found[0] for each in found)


class Pairs(AdasumReducer):
    """Adasum as an operator that reads no trees."""

    name = "Pairs"
    reads_tree = False

    def reads_tree_of(self, dtype: torch.dtype) -> bool:
        return False


@everywhere
@pytest.mark.parametrize("op", [Pairs(), Longest()], ids=str)
def test_an_operator_that_reads_no_trees_is_refused_before_anything_is_sent(
    way: str, op: Reducer
) -> None:
    def work(group: Group) -> None:
        tensor = torch.ones(9)
        for call in (
            lambda: group.all_reduce(tensor, op, algorithm="direct"),
            lambda: group.all_reduce_init(tensor, op, algorithm="direct#2"),
            lambda: group.check_algorithm("direct", op),
            lambda: group.run(direct.all_reduce(3), tensor, op),
        ):
            with pytest.raises(ValueError, match=r"does not read the trees of operands"):
                call()
        with pytest.raises(
            ValueError, match=rf"{op}, which does not .*: use .*oneshot, psgpu, pscpu$"
        ):
            group.check_algorithm("direct", op)
        assert tensor.eq(1).all()
        group.all_reduce(tensor, Sum)

    run(way, 3, work)


@on_ranks(4)
def test_a_users_schedule_with_a_tree_refuses_what_does_not_read_it(group: Group) -> None:
    mine = vectors("common", 4, torch.float64)[group.rank]
    with pytest.raises(ValueError, match=r"cannot carry Adasum of torch\.float64, which does"):
        group.run(direct.all_reduce(4), mine, Adasum)


@pytest.mark.parametrize("cuts", [(0, 1003), (0, 130, 1003), (0, 100, 101, 450, 1003)])
@pytest.mark.parametrize("kind", ["common", "zeros", "opposed 1e-06"])
def test_reduce_and_plans_of_pieces_with_a_tree_have_the_same_bits(
    kind: str, cuts: Sequence[int]
) -> None:
    """Whether pieces cut segments or not; a plan runs on what its tensors then hold."""
    for dtype, op in itertools.product(NARROW, (Adasum, UNWEIGHTED)):
        inputs = vectors(kind, 5, dtype)
        held = [vector.clone() for vector in inputs]
        outs = [torch.full_like(inputs[0], float("nan")) for _ in range(2)]
        both = [
            Operands(
                [
                    Piece(tuple(part[low:high] for part in parts), out[low:high], low)
                    for low, high in itertools.pairwise(cuts)
                ],
                1003,
                BOUNDS,
                None,
                (1,) * 5,
                balanced_tree(5),
            )
            for parts, out in zip((inputs, held), outs, strict=True)
        ]
        op.reduce(both[0])
        run_again = op.bind(both[1])
        for part in held:
            part.zero_()
        run_again()
        assert not outs[1].any()
        for part, vector in zip(held, inputs, strict=True):
            part.copy_(vector)
        run_again()
        assert bits(outs[0]) == bits(outs[1])
        check(outs[0], defined(inputs, weighted=op.weighted), (kind, dtype, op, cuts))
