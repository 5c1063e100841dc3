"""Sum and Average by every algorithm against NumPy, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import Average, Group, Sum, run_threads
from tests.accuracy.reference import exact
from tests.accuracy.vectors import KINDS, NUMEL, vectors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALGORITHMS = (
    "xring",
    "rechd",
    "rd",
    "vhdd",
    "direct",
    "pscpu",
    "psgpu#2",
    "rechd#2",
    "rd:100:xring",
)
TWO_LEVEL = ("xring/rechd", "psgpu/rd", "rechd/psgpu", "direct/direct")
# "huge" Sums of float16 overflow, which is the subject of test_special.py.
FINITE = [kind for kind in KINDS if kind != "huge"]


@pytest.mark.parametrize("size", [2, 3, 8, pytest.param(13, marks=pytest.mark.slow)])
def test_sums_and_averages_of_every_kind_are_within_bounds(size: int) -> None:
    algorithms = ALGORITHMS + (TWO_LEVEL if size % 2 == 0 else ())
    cases = [(a, d, op) for a in algorithms for d in DTYPES for op in (Sum, Average)]

    def run(group: Group) -> list[bytes]:
        answers = []
        for algorithm, dtype, op in cases:
            mine = torch.cat([vectors(kind, size, dtype)[group.rank] for kind in FINITE])
            group.all_reduce(mine, op, algorithm=algorithm)
            answers.append(mine.view(torch.uint8).numpy().tobytes())
        return answers

    local_size = 2 if size % 2 == 0 else 1
    first, *others = run_threads(size, run, local_size=local_size)
    assert all(other == first for other in others)
    terms = {
        dtype: np.stack(
            [
                np.concatenate([exact(vectors(kind, size, dtype)[rank]) for kind in FINITE])
                for rank in range(size)
            ]
        )
        for dtype in DTYPES
    }
    for (algorithm, dtype, op), raw in zip(cases, first, strict=True):
        got = exact(torch.frombuffer(bytearray(raw), dtype=dtype))
        scale = 1 if op is Sum else size
        want, reach = terms[dtype].sum(0) / scale, np.abs(terms[dtype]).sum(0) / scale
        # n - 1 additions and a division, each half a unit of a partial sum no larger than the sum
        # of the sizes; twice that for products of such errors. Additions of subnormals are exact,
        # and the division rounds them by half a spacing. Averages of float16 divide by P, the least
        # power of two not below n, before the sum: half a spacing for each term, n / P of one.
        info = torch.finfo(dtype)
        power = 1 / op.prescale(dtype, size)
        bound = size * info.eps * reach + (power + 1) / 2 * info.smallest_normal * info.eps
        assert got.size == len(FINITE) * NUMEL
        assert (np.abs(got - want) <= bound).all(), (algorithm, dtype, op)
