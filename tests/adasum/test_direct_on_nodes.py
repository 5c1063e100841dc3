"""Adasum by `direct` over nodes and many ranks: precise, and with equal bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adasum import Adasum
from collectives import Group, run_threads
from collectives.schedules import direct
from collectives.schedules.topology import Topology
from tests.adasum.test_direct import (
    BOUNDS,
    KINDS,
    NARROW,
    UNWEIGHTED,
    bits,
    check,
    defined,
    vectors,
)
from tests.collectives.consistency.ranks import WAYS, run, start_and_wait

# Ranks, and ranks a node; folded ones, too.
QUICK = ((4, 2), (8, 4))
SLOW = ((8, 2), (16, 8), (16, 2), (17, 17), (24, 8), (32, 8), (32, 1))
NODES = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize(("size", "local"), NODES)
def test_ranks_on_nodes_are_the_tree_of_longdoubles_within_100_eps(size: int, local: int) -> None:
    """Powers of two unweighted are Horovod's Adasum."""
    cases = [(k, d, op) for k in KINDS for d in NARROW for op in (Adasum, UNWEIGHTED)]
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


def test_nodes_have_the_same_bits_by_every_way_in_every_run_and_as_requests() -> None:
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
                own = direct.all_reduce(4)
                other = group.run(own, vector.clone(), Adasum, segments=BOUNDS)
                answers.append(bits(mine))
                assert answers[-1] == bits(again) == bits(other)
        return answers

    found = [each for way in WAYS for each in run(way, 4, work, topology=topology)]
    assert all(each == found[0] for each in found)
