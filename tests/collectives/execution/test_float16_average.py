"""Averages in float16: divided before the sum and after it, so that they cannot overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import Average, FusedBuffer, Group, run_threads

Tensor = torch.Tensor
SIZES = [2, 3, 5, 6, 7, 8]
ALGORITHMS = ["auto", "rd", "rechd", "xring", "psgpu", "pscpu", "bruck"]
# float16's unit in the last place of 1.
EPS = 2.0**-10


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
def test_average_of_40000_is_40000_by_every_path(size: int) -> None:
    def job(group: Group) -> None:
        def large(count: int = 37) -> Tensor:
            return torch.full((count,), 40000.0, dtype=torch.float16)

        def check(*tensors: Tensor | Any) -> None:
            for tensor in tensors:
                # n - 1 additions and the division round once each; exact where the sums are.
                near = torch.full((tensor.numel(),), 40000.0)
                assert torch.allclose(tensor.float(), near, rtol=size * EPS, atol=0.0)

        for name in ALGORITHMS:
            mine = group.all_reduce(large(), Average, algorithm=name)
            check(mine)
            if name == "rd" and size == power_of_two(size):
                assert mine.tolist() == [40000.0] * 37  # type: ignore[union-attr]
            check(*group.grouped_all_reduce([large(), large(5)], Average, algorithm=name))
        check(group.all_reduce(large(2_000_000), Average))
        fused = FusedBuffer([large(), large(5)])
        for tensor in fused.tensors:
            tensor.fill_(40000.0)
        check(*group.grouped_all_reduce(fused.tensors, Average))
        tensor = large()
        request = group.all_reduce_init(tensor, Average)
        for _ in range(2):
            request.start()
            check(request.wait())
        check(group.all_reduce(large(), Average, prescale=1.5, postscale=0.5).mul(4 / 3))
        check(group.reduce_scatter(large(), Average))
        mine = [large(), large(5)]
        if group.rank == 1:
            check(group.reduce(mine[0], 1, Average))
        else:
            group.reduce(mine[0], 1, Average)
        mine = [large(), large(5)]
        owners = group.reduce_to_owners(mine, Average)
        check(*(each for each, owner in zip(mine, owners, strict=True) if owner == group.rank))
        check(hvd.allreduce(large(), op=hvd.Average))
        check(hvd.allreduce(large().float(), compression=hvd.Compression.fp16))
        check(hvd.reducescatter(large(size).view(size, 1), op=hvd.Average).view(-1))

    run_threads(size, job)


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_ranks_that_have_joined_count(size: int) -> None:
    def job(group: Group) -> None:
        if group.rank:
            group.join()
            return
        for count in (5, 2_000_000):
            mine = torch.full((count,), 40000.0, dtype=torch.float16)
            group.all_reduce(mine, Average)
            expected = torch.tensor(40000.0 / size).half()
            # A sum with zeros is exact; 40000 / P is too, and the division rounds once.
            assert torch.equal(mine, expected.expand(count))
        group.join()

    run_threads(size, job)
