"""Adasum by every algorithm against NumPy, within bounds that follow from the arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from adasum import Adasum
from collectives import Group, run_threads
from collectives.schedules.algorithm import Order
from collectives.schedules.registry import ALGORITHMS
from collectives.schedules.spec import parse_all_reduce_spec
from tests.accuracy.reference import Node, Rounding, averages, exact, norm, replay
from tests.accuracy.vectors import EXACT, KINDS, NOT_FINITE, NUMEL, WELL_CONDITIONED, vectors
from tests.kernels.trees import balanced, in_line

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = (2, 3, 5, 6, 8, 11, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 7, 16)))
FLAT = ("vhdd", "rd", "direct", "xring", "bruck", "vhdd#2")
TWO_LEVEL = ("rechd/vhdd", "xring/rd", "direct/direct", "psgpu/xring")

# All kinds lie in one buffer, each a segment, so that one reduction does them all.
BOUNDS = tuple(range(0, len(KINDS) * NUMEL + 1, NUMEL))


class Case(NamedTuple):
    """One reduction."""

    algorithm: str
    dtype: torch.dtype


def _cases(size: int) -> list[Case]:
    flat = FLAT if size <= 8 else FLAT[:5]
    algorithms = flat + (TWO_LEVEL if size % 2 == 0 else ())
    return [Case(algorithm, dtype) for algorithm in algorithms for dtype in DTYPES]


def _expected(case: Case, kind: str, size: int) -> Node:
    rounding = Rounding.of(case.dtype)
    values = [exact(term) for term in vectors(kind, size, case.dtype)]
    leaves = [Node(value, 0.0) for value in values]
    if "/" in case.algorithm:
        leaves = averages(values, 2, rounding)
    (spec,) = parse_all_reduce_spec(case.algorithm)
    rows = in_line if ALGORITHMS[spec.outer].order is Order.LINE else balanced
    return replay(leaves, rows(len(leaves)), rounding)


@pytest.mark.parametrize("size", SIZES)
def test_adasum_of_every_kind_of_vectors_is_within_bounds(size: int) -> None:
    cases = _cases(size)

    def run(group: Group) -> list[bytes]:
        answers = []
        for algorithm, dtype in cases:
            mine = torch.cat([vectors(kind, size, dtype)[group.rank] for kind in KINDS])
            group.all_reduce(mine, Adasum, algorithm=algorithm, segments=BOUNDS)
            answers.append(mine.view(torch.uint8).numpy().tobytes())
        return answers

    local_size = 2 if size % 2 == 0 else 1
    first, *others = run_threads(size, run, local_size=local_size)
    assert all(other == first for other in others)
    # A second run gives the same bits.
    assert size > 8 or run_threads(size, run, local_size=local_size)[0] == first
    for case, raw in zip(cases, first, strict=True):
        answer = torch.frombuffer(bytearray(raw), dtype=case.dtype)
        for kind, got in zip(KINDS, answer.split(NUMEL), strict=True):
            if kind in NOT_FINITE:
                assert not got[NUMEL // 2].isfinite(), (case, kind)
                continue
            want = _expected(case, kind, size)
            error = norm(exact(got) - want.value)
            assert error == 0.0 or kind not in EXACT, (case, kind, error)
            assert error <= want.error, (case, kind, error, want.error)
            if size <= 8 and kind in WELL_CONDITIONED:
                # The contract's promise.
                bound = 100 * torch.finfo(case.dtype).eps * norm(want.value)
                assert error <= bound, (case, kind, error, bound)


# Of bfloat16's three digits five ranks leave too few to tell.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_bounds_of_adasum_tell_one_order_from_another(dtype: torch.dtype) -> None:
    """A tree, a line and a tree of other neighbours differ by more than rounding may explain."""
    rounding = Rounding.of(dtype)
    leaves = [Node(exact(vector), 0.0) for vector in vectors("common", 5, dtype)]
    answers = [
        replay(leaves, balanced(5), rounding),
        replay(leaves, in_line(5), rounding),
        replay(leaves[1:] + leaves[:1], balanced(5), rounding),
    ]
    for i, one in enumerate(answers):
        for other in answers[:i]:
            assert norm(one.value - other.value) > 2 * max(one.error, other.error)
