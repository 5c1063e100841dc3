"""Reduction onto owners in one pass: the bits of rd and rechd, and what it sends."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from collectives import Average, FusedBuffer, Group, Sum, run_threads
from collectives.schedules import to_owners
from collectives.schedules.verify import verify
from tests.collectives.schedules.simulation import cost

SHAPES = [(3, 5), (), (0,), (129,), (64, 7), (130,), (2, 2)]


def test_both_halves_are_proved() -> None:
    for n in range(1, 65):
        for schedule in (to_owners.reduce_scatter(n), to_owners.all_gather(n)):
            assert verify(schedule).steps == (n.bit_length() - 1) + 2 * bool(n & (n - 1))
        assert sorted(to_owners.order(n)) == list(range(n))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 64])
def test_costs_are_as_documented(n: int) -> None:
    power = 1 << (n.bit_length() - 1)
    for schedule in (to_owners.reduce_scatter(n), to_owners.all_gather(n)):
        costs = cost(schedule)
        assert max(costs.sent) <= (1 if n == power else 2)
        if n == power:
            assert costs.sent == costs.received == (Fraction(n - 1, n),) * n
    assert cost(to_owners.reduce_scatter(n)).staged == (Fraction(1, 2) if n == power else 1)


def _values(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 8))]
)
def test_reduction_to_given_owners_has_the_bits_of_rd_and_rechd(size: int, op: Sum) -> None:
    """Packed, in a FusedBuffer, and of dtypes that nothing packs; on scattered and few owners."""

    def work(group: Group) -> None:
        for owners in ([(3 * i + 1) % size for i in range(len(SHAPES))], [size - 1] * len(SHAPES)):
            for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64):
                scales = {"prescale": 0.3, "postscale": 0.7}
                want = _values(group.rank, dtype)
                for algorithm in ("rd", "rechd"):
                    want = _values(group.rank, dtype)
                    group.grouped_all_reduce(want, op, algorithm=algorithm, **scales)
                    mine = _values(group.rank, dtype)
                    got = group.reduce_to_owners(mine, op, owners=owners, **scales)
                    assert got == owners
                    _check_mine(group, owners, mine, want)
                group.broadcast_from_owners(mine, owners=owners)
                assert all(map(torch.equal, mine, want))

    run_threads(size, work)


def _check_mine(
    group: Group, owners: list[int], got: list[torch.Tensor], want: list[torch.Tensor]
) -> None:
    """Compare the tensors that this rank owns, and spoil the others."""
    for one, other, owner in zip(got, want, owners, strict=True):
        if owner == group.rank:
            assert torch.equal(one, other)
        else:
            one.fill_(float("nan"))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_fused_buffer_in_the_owners_order_is_reduced_in_place(size: int) -> None:
    def work(group: Group) -> None:
        order = group.owners_order()
        owners = sorted((i % size for i in range(len(SHAPES))), key=order.index)
        fused = FusedBuffer([torch.empty(shape) for shape in SHAPES])
        request = group.reduce_to_owners_init(fused.tensors, Average, owners=owners)
        for step in range(3):
            torch._foreach_copy_(fused.tensors, _values(group.rank + 10 * step, torch.float32))
            want = _values(group.rank + 10 * step, torch.float32)
            group.grouped_all_reduce(want, Average, algorithm="rechd")
            request.start()
            request.wait()
            _check_mine(group, owners, fused.tensors, want)
            group.broadcast_from_owners(fused.tensors, owners=owners, async_op=True).wait()
            assert all(map(torch.equal, fused.tensors, want))
        assert group._runner.packed.take(1, fused.buffer).untyped_storage().nbytes() < 64

    run_threads(size, work)


def test_owners_that_are_no_ranks_or_differ_raise() -> None:
    def work(group: Group) -> None:
        tensors = [torch.ones(2), torch.ones(3)]
        with pytest.raises(ValueError, match="owners must be one rank for each of 2 tensors"):
            group.reduce_to_owners(tensors, owners=[0])
        with pytest.raises(ValueError, match=r"owners\[1\]"):
            group.broadcast_from_owners(tensors, owners=[0, 2])
        with pytest.raises(TypeError, match="owners must be a list of ranks"):
            group.reduce_to_owners(tensors, owners=0)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="owners=\\[0, 0\\]"):
            group.reduce_to_owners(tensors, owners=[group.rank, 0])

    run_threads(2, work)
