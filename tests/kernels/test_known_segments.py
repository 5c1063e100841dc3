"""Segments beside tensors of which all is known."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels


@pytest.mark.parametrize("function", ["dot_and_norms", "combine", "adasum"])
def test_segments_are_looked_at_every_time(function: str) -> None:
    a, b = torch.randn(8, 4), torch.randn(8, 4)

    def call(segments: Any, rows: int) -> Tensor:
        given = (torch.ones(rows, 3, dtype=torch.float64),) if function == "combine" else ()
        return getattr(kernels, function)(a, b, *given, segments)

    whole, halves, listed = (0, 32), (0, 16, 32), [0, 16, 32]
    expected = {whole: call((0, 32), 1), halves: call((0, 16, 32), 2)}
    assert function == "combine" or not torch.equal(expected[whole], expected[halves])
    for _ in range(4):
        assert torch.equal(call(None, 1), expected[whole])
        assert torch.equal(call(halves, 2), expected[halves])
        assert torch.equal(call(listed, 2), expected[halves])
        listed[1] = 40
        with pytest.raises(ValueError, match="segments must not decrease"):
            call(listed, 2)
        listed[1] = 16
        for _ in range(2):
            assert torch.equal(call(whole, 1), expected[whole])
        # Equal to what is known.
        for wrong in ((0, 32.0), (False, 32)):
            with pytest.raises(TypeError, match="segments must hold ints"):
                call(wrong, 1)
        with pytest.raises(ValueError, match="segments must start at 0 and end at the 32"):
            call((0, 16), 1)
        if function == "combine":
            for segments, rows in ((None, 2), (whole, 2), (halves, 1)):
                with pytest.raises(ValueError, match="dots has shape"):
                    call(segments, rows)


def test_threads_with_segments_of_their_own() -> None:
    a, b = torch.randn(64), torch.randn(64)
    cuts = [(0, cut, 64) for cut in (8, 16, 24, 32)]
    expected = [kernels.adasum(a, b, cut) for cut in cuts]

    def work(which: int) -> bool:
        return all(
            torch.equal(kernels.adasum(a, b, cuts[which]), expected[which]) for _ in range(500)
        )

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(cuts)) as pool:
            assert all(pool.map(work, range(len(cuts))))
    finally:
        sys.setswitchinterval(before)
