"""Complex tensors: what an operator takes is reduced, one by one and in groups, over everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from collectives import Average, FusedBuffer, Group, Reducer, Sum, run_threads
from collectives.reducers import as_real
from tests.collectives.consistency.ranks import everywhere, run

Tensor = torch.Tensor
DTYPES = (torch.complex32, torch.complex64, torch.complex128)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZE = 3
# Of one element, of an odd number, and of more than a call in shared memory reduces by itself.
NUMELS = (1, 77, 40_000)


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    pairs = torch.randint(-8, 9, (numel, 2), generator=generator)
    return torch.view_as_complex(pairs.double()).to(dtype)


def total(numel: int, dtype: torch.dtype) -> Tensor:
    return sum(values(rank, numel, torch.complex128) for rank in range(SIZE)).to(dtype)  # type: ignore[union-attr]


def average(numel: int, dtype: torch.dtype) -> Tensor:
    """The sum, its reals divided once: halves by 4 before it and by 3/4 behind it."""
    reals = as_real(total(numel, dtype))
    reals = reals / 4 / 0.75 if dtype is torch.complex32 else reals / 3
    return torch.view_as_complex(reals)


EXPECTED: dict[Reducer, Callable[[int, torch.dtype], Tensor]] = {Sum: total, Average: average}


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(as_real(one), as_real(other))


@everywhere
@dtypes
@pytest.mark.parametrize("op", EXPECTED, ids=str)
def test_complex_tensors_are_reduced_alone_and_in_groups(
    way: str, dtype: torch.dtype, op: Reducer
) -> None:
    def job(group: Group) -> None:
        for numel in NUMELS:
            mine = values(group.rank, numel, dtype)
            assert equal(group.all_reduce(mine, op), EXPECTED[op](numel, dtype))
        many = [values(group.rank, numel, dtype) for numel in NUMELS]
        many.append(torch.ones(5))
        group.grouped_all_reduce(many, op)
        for tensor, numel in zip(many, NUMELS, strict=False):
            assert equal(tensor, EXPECTED[op](numel, dtype))

    run(way, SIZE, job)


@dtypes
def test_infinity_in_a_complex_tensor_stays_in_its_part(dtype: torch.dtype) -> None:
    """Infinity times a complex number, such as 2 + 0i, has an imaginary part that is NaN."""

    def job(group: Group) -> None:
        one = torch.view_as_complex(torch.tensor([[torch.inf, 1.0], [2.0, 3.0]])).to(dtype)
        for tensor in (
            group.all_reduce(one.clone(), Sum, prescale=2.0, postscale=0.5),
            group.all_reduce(one.clone(), Average),
        ):
            assert as_real(tensor)[0].tolist()[0] == torch.inf
            assert not as_real(tensor).isnan().any()

    run_threads(2, job)


def test_fused_buffer_of_complex_tensors_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match="complex64"):
        FusedBuffer([torch.ones(3, dtype=torch.complex64)])
