"""Gradients through Horovod's functions against differences of the losses. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import adasum as hvd
from collectives import Group, run_threads
from tests.adasum.jobs import on_ranks

Function = Callable[[Tensor], Tensor]


def whole(seed: int, *shape: int) -> Tensor:
    """Multiples of 36: their sums, and halves and thirds of those, are exact."""
    generator = torch.Generator().manual_seed(seed)
    return 36.0 * torch.randint(-9, 10, shape, generator=generator).double()


def total_loss(function: Function, tensor: Tensor, rank: int) -> float:
    """The sum of the ranks' losses."""
    answer = function(tensor)
    loss = (answer * whole(100 + rank, *answer.shape)).sum().reshape(1)
    return hvd.allreduce(loss, op=hvd.Sum).item()


def check(
    function: Function, tensor: Tensor, group: Group, divisor: int = 1, factor: int = 1
) -> None:
    """The gradient on every rank is factor / divisor times the derivative of the sum of all losses.

    The functions are linear and the numbers exact, so differences of any width are the derivative.
    """
    given = tensor.clone().requires_grad_()
    answer = function(given)
    (answer * whole(100 + group.rank, *answer.shape)).sum().backward()
    assert given.grad is not None
    sizes = [int(n) for n in hvd.allgather(torch.tensor([tensor.numel()]))]
    for rank, size in enumerate(sizes):
        for element in range(size):
            sides = []
            for step in (6.0, -6.0):
                moved = tensor.clone()
                if group.rank == rank:
                    moved[divmod(element, tensor.shape[1])] += step
                sides.append(total_loss(function, moved, group.rank))
            if group.rank == rank:
                derivative = (sides[0] - sides[1]) / 12.0
                assert (
                    given.grad[divmod(element, tensor.shape[1])].item()
                    == derivative * factor / divisor
                )


def linear_functions(group: Group) -> None:
    size = group.size
    tensor = whole(group.rank, 2, 2)
    for op in (hvd.Sum, hvd.Average):
        check(lambda t, op=op: hvd.allreduce(t, op=op), tensor, group)
    check(
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        tensor.t(),
        group,
    )

    def two(t: Tensor) -> Tensor:
        # Only the first answer is used, and one has no gradient at all.
        first, *_ = hvd.grouped_allreduce([2.0 * t, t.detach(), torch.arange(3)], op=hvd.Sum)
        return first

    check(two, tensor, group)
    rows = whole(group.rank, group.rank + 1, 2)
    check(lambda t: hvd.allgather(t), rows, group, size)
    for root in range(size):
        check(lambda t, root=root: hvd.broadcast(t, root, name="b"), tensor, group, size)
    rows = whole(group.rank, size + 2, 2)
    check(lambda t: hvd.alltoall(t[:size]), rows, group)
    splits = [(group.rank + r) % 2 for r in range(size)]
    check(lambda t: hvd.alltoall(t, splits)[0], rows, group)
    for op in (hvd.Sum, hvd.Average):
        check(lambda t, op=op: hvd.reducescatter(t, op=op), rows, group, factor=size)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_linear_functions_equal_the_derivative(size: int) -> None:
    run_threads(size, linear_functions)


@on_ranks(2)
def test_gradients_flow_through_the_handles_of_async_functions(group: Group) -> None:
    """The result may be asked for again, and where nothing is recorded; it is the same tensor."""
    rows = whole(group.rank, 4, 2)
    for start, function in (
        (hvd.allreduce_async, hvd.allreduce),
        (lambda t: hvd.grouped_allreduce_async([t, t.detach()]), hvd.allreduce),
        (hvd.allgather_async, hvd.allgather),
        (lambda t: hvd.broadcast_async(t, 1), lambda t: hvd.broadcast(t, 1)),
        (hvd.alltoall_async, hvd.alltoall),
        (hvd.reducescatter_async, hvd.reducescatter),
    ):
        gradients = []
        for way in (start, function):
            given = rows.clone().requires_grad_()
            answer: Any = way(given)
            if way is start:
                with torch.no_grad():
                    handle, answer = answer, hvd.synchronize(answer)
                again = hvd.synchronize(handle)
                if isinstance(answer, list | tuple):
                    answer, again = answer[0], again[0]
                assert again is answer
            (answer * whole(100 + group.rank, *answer.shape)).sum().backward()
            assert given.grad is not None
            gradients.append(given.grad)
        assert torch.equal(*gradients)


@on_ranks(2)
def test_gradient_of_adasum_is_reduced_by_adasum(group: Group) -> None:
    """As Horovod does it; no derivative."""
    mine, weight = whole(group.rank, 5), whole(100 + group.rank, 5)
    given = mine.clone().requires_grad_()
    other = mine.clone().requires_grad_()
    answer, second = hvd.grouped_allreduce([given, other], op=hvd.Adasum)
    (answer * weight + 2.0 * second * weight).sum().backward()
    want = hvd.grouped_allreduce([weight, 2.0 * weight], op=hvd.Adasum)
    assert given.grad is not None and other.grad is not None
    assert torch.equal(given.grad, want[0])
    assert torch.equal(other.grad, want[1])


def test_gradients_on_some_ranks_only_raise_everywhere() -> None:
    def run(group: Group) -> Any:
        given = torch.ones(2, requires_grad=group.rank == 0)
        return hvd.allreduce(given).requires_grad

    assert run_threads(2, run) == [True, False]


@on_ranks(2)
def test_what_autograd_records_is_not_overwritten_behind_its_back(group: Group) -> None:
    """Of what is not a leaf the gradient would be that of doing nothing."""
    leaf = torch.ones(3, requires_grad=True)
    for call, name in (
        (lambda y: hvd.allreduce_(y, op=hvd.Sum), "allreduce_"),
        (
            lambda y: hvd.grouped_allreduce_([torch.ones(1), y], op=hvd.Sum),
            "grouped_allreduce_",
        ),
        (lambda y: hvd.broadcast_(y, 0), "broadcast_"),
    ):
        with pytest.raises(NotImplementedError, match=f"gradients through {name}, in place"):
            call(leaf * 2)
        with torch.no_grad():
            call(leaf * 2)
        for allowed in ((leaf * 2).detach(), leaf, leaf.view(-1), leaf[:2]):
            call(allowed)


@on_ranks(1)
def test_tangents_of_forward_mode_are_refused_where_they_would_be_lost(group: Group) -> None:
    x = torch.ones(1, 2)
    calls = (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce_)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (*calls, lambda tensor: hvd.broadcast(tensor, 0)):
            with pytest.raises(ValueError, match="tensor has a tangent"):
                call(dual)
        assert torch.equal(hvd.allreduce(x), x)
