"""Segments beside tensors of which all is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _known, projection


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


def test_a_thread_with_other_segments_between_two_readings() -> None:
    a, halves = torch.randn(32), (0, 16, 32)

    class Changing(_known.Known[Any]):
        """After one reading it is another thread's."""

        @property
        def value(self) -> Any:
            self.readings += 1
            return projection._cut(halves if self.readings == 1 else (0, 32), a)

        @value.setter
        def value(self, _: Any) -> None:
            self.readings = 0

    assert projection._bounds(Changing(None), halves, a) == halves
    assert projection._bounds(Changing(None), (0, 8, 32), a) == (0, 8, 32)
