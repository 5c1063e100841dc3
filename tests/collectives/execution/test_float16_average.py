"""Averages in float16: divided before the sum and after it, so that they cannot overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import Average, FusedBuffer, Group, Sum, run_threads
from collectives.reducers import as_real

Tensor = torch.Tensor
SIZES = [2, 3, 5, 6, 7, 8]
ALGORITHMS = ["auto", "rd", "rechd", "xring", "psgpu", "pscpu", "bruck"]
# float16's unit in the last place of 1, and its least subnormal number.
EPS, TINY = 2.0**-10, 2.0**-24


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def inputs(size: int, count: int = 1003, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [(scale * torch.randn(count, generator=generator)).half() for _ in range(size)]


def assert_average(result: Tensor, terms: list[Tensor]) -> None:
    """Compare with the mean in float64."""
    size = len(terms)
    wide = torch.stack([term.double() for term in terms])
    # The sum's n - 1 additions and the division round once each, by half an eps of at most the mean
    # of magnitudes. What is divided by P loses half a TINY in each of n terms, n / P in the mean's
    # units, and the result itself another half.
    bound = size * EPS * wide.abs().mean(0) + (power_of_two(size) + 1) * TINY / 2
    assert ((result.double() - wide.mean(0)).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
def test_average_of_40000_is_40000_by_every_path(size: int) -> None:
    def job(group: Group) -> None:
        def large(count: int = 37) -> Tensor:
            return torch.full((count,), 40000.0, dtype=torch.float16)

        def check(*tensors: Tensor | Any) -> None:
            for tensor in tensors:
                # As in assert_average; exact where the partial sums are.
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


@pytest.mark.parametrize("size", [2, 3, 6])
def test_gradients_of_40000_stay_finite_in_hooks_and_optimizer(size: int) -> None:
    def job(group: Group) -> None:
        buffer = torch.full((37,), 40000.0, dtype=torch.float16)
        hvd.HookState(hvd.Average, process_group=group).start(buffer, "bucket", [0, 37]).wait()
        weights = torch.nn.Linear(37, 1, bias=False)
        hvd.broadcast_parameters(weights.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights.parameters(), lr=1.0),
            named_parameters=weights.named_parameters(),
            compression=hvd.Compression.fp16,
        )
        weights(torch.full((1, 37), 40000.0)).sum().backward()
        optimizer.synchronize()
        assert weights.weight.grad is not None
        for result in (buffer, weights.weight.grad.view(-1)):
            assert_average(result, [torch.full((37,), 40000.0, dtype=torch.float16)] * size)

    run_threads(size, job)


@pytest.mark.parametrize("spec", ["rechd/rd", "xring/xring", "psgpu/rechd", "rechd/xring"])
def test_two_levels_average_without_scaling_twice(spec: str) -> None:
    terms = inputs(6, scale=1000.0)

    def job(group: Group) -> None:
        assert_average(
            group.all_reduce(terms[group.rank].clone(), Average, algorithm=spec),  # type: ignore[arg-type]
            terms,
        )
        large = torch.full((9,), 40000.0, dtype=torch.float16)
        for op, algorithm in ((Average, spec), (hvd.Adasum, "rechd/vhdd")):
            group.all_reduce(mine := large.clone(), op, algorithm=algorithm)
            assert mine.tolist() == [40000.0] * 9

    run_threads(6, job, local_size=3)


@pytest.mark.parametrize("scale", [1.0, 3e-5, 1e-6])
@pytest.mark.parametrize("size", SIZES)
def test_average_is_within_rounding_also_in_subnormals(size: int, scale: float) -> None:
    terms = inputs(size, scale=scale)

    def job(group: Group) -> None:
        for name in ALGORITHMS:
            mine, *packed = (terms[group.rank].clone() for _ in range(3))
            group.all_reduce(mine, Average, algorithm=name)
            group.grouped_all_reduce(packed, Average, algorithm=name)
            for result in (mine, *packed):
                assert_average(result, terms)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_other_dtypes_are_divided_once_at_the_end(dtype: torch.dtype) -> None:
    def job(group: Group) -> None:
        assert Average.prescale(dtype, 3) == 1.0
        mine = torch.randn(77, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
        averaged, summed = mine.clone(), mine.clone()
        group.all_reduce(averaged, Average)
        group.all_reduce(summed, Sum)
        # A complex number as two reals: its quotient by a complex 3 is rounded more than once.
        assert torch.equal(as_real(averaged), as_real(summed) / 3)

    run_threads(3, job)
