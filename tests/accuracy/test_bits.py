"""The same bits with every division into buckets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from adasum import Adasum
from collectives import Average, FusedBuffer, Group, Sum, run_threads

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (1, 64, 3, 203, 0, 17, 128)


def _parts(group: Group, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    drawn = [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [part.to(dtype) for part in drawn]


def _grouped(
    group: Group, op: object, algorithm: str, dtype: torch.dtype, buckets: Sequence[Sequence[int]]
) -> list[bytes]:
    """Return the bits of each part, reduced in these buckets, packed or in a buffer."""
    parts = _parts(group, dtype)
    for bucket in buckets:
        chosen = [parts[i] for i in bucket]
        group.grouped_all_reduce(chosen, op, algorithm=algorithm)
    fused = [_parts(group, dtype)[i] for i in buckets[0]]
    buffer = FusedBuffer(fused)
    for view, part in zip(buffer.views, fused, strict=True):
        view.copy_(part)
    group.grouped_all_reduce(buffer.tensors, op, algorithm=algorithm)
    for i, view in zip(buckets[0], buffer.views, strict=True):
        assert torch.equal(view.view(torch.uint8), parts[i].view(torch.uint8)), algorithm
    return [part.view(torch.uint8).numpy().tobytes() for part in parts]


@pytest.mark.parametrize("size", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))])
@pytest.mark.parametrize(
    ("op", "algorithm"),
    # What the contract promises: sums by these two; and Adasum by rd, whose dot products are
    # taken over whole segments by one rank alone.
    [(Sum, "rd"), (Sum, "rechd"), (Average, "rd"), (Average, "rechd"), (Adasum, "rd")],
    ids=lambda value: str(value),
)
def test_buckets_of_any_size_give_the_same_bits(op: object, algorithm: str, size: int) -> None:
    layouts = (
        [[i] for i in range(len(LENGTHS))],
        [[*range(len(LENGTHS))]],
        [[0, 1, 2], [3], [4, 5, 6]],
        [[*reversed(range(len(LENGTHS)))]],
    )

    def run(group: Group) -> None:
        for dtype in DTYPES:
            first, *others = (_grouped(group, op, algorithm, dtype, each) for each in layouts)
            assert all(other == first for other in others), dtype

    run_threads(size, run)
