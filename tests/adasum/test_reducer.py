"""What the Adasum reducer chooses; its answers are in tests/accuracy and test_direct.py."""

from __future__ import annotations

import pytest
import torch

from adasum import Adasum
from collectives import Needs, Operands
from collectives.reducers import Piece
from tests.kernels.cases import random
from tests.ptx_emulator.driver import emulated

# There is an empty segment, and one of one element.
BOUNDS = (0, 1, 1, 130, 900, 1003)


def test_algorithm_is_direct_of_3_to_16_ranks_and_by_size_of_others() -> None:
    for size in range(2, 20):
        for nbytes, of_others in ((1024, "rd"), (1 << 24, "vhdd")):
            expected = "direct" if 3 <= size <= 16 else of_others
            assert Adasum.algorithm(nbytes, size) == expected
    assert Adasum.needs is Needs.ONE_TREE


def test_reduction_on_a_gpu_waits_for_no_other_program() -> None:
    """A cooperative launch beside NCCL's kernels could wait for them, and they for other ranks."""
    pytest.importorskip("triton")
    left, right = (random(1003, torch.float32, "cpu", seed) for seed in (1, 2))
    pieces = [Piece((left, right), torch.empty_like(left), 0)]
    with emulated() as emulator:
        Adasum.reduce(Operands(pieces, 1003, BOUNDS, None))
        first = pieces[0].out.clone()
        Adasum.bind(Operands(pieces, 1003, BOUNDS, None))()
    assert [each.name for each in emulator.launches] == ["_dots_kernel", "_combine_kernel"] * 2
    assert torch.equal(first, pieces[0].out)
