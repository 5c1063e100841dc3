"""Ranks that start from different parameters are told so, before anything is reduced."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum.optimizer.consistency.parameter_check import require_equal_parameters
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.definition import loss_of, make_model
from tests.adasum.jobs import WAYS, on_ranks, wrapped


def _training(rank: int, **options: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model that is another on rank 1, but for its first layer, and its optimizer."""
    model = make_model()
    if rank == 1:
        with torch.no_grad():
            model[-1].weight[0, 0] += 1.0
    return model, wrapped(model, **options)


def _step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_first_step_without_broadcast_parameters_raises_on_every_rank(way: str) -> None:
    def job(group: Group) -> tuple[str, list[Tensor]]:
        model, optimizer = _training(group.rank, **WAYS[way])
        before = [each.clone() for each in model.parameters()]
        with pytest.raises(CollectiveMismatchError) as caught:
            _step(model, optimizer, group.rank)
        assert all(map(torch.equal, before, model.parameters()))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for seed in range(2):
            _step(model, optimizer, 2 * seed + group.rank)
        return str(caught.value), [each.detach() for each in model.parameters()]

    (text, mine), (other_text, others) = run_threads(2, job)
    assert text == other_text
    assert "2.weight on ranks [1] is not what it is on rank 0" in text
    assert "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in text
    assert all(map(torch.equal, mine, others))


def test_variable_says_whether_ranks_compare_unless_the_argument_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job(group: Group, said: bool | None, differ: bool) -> None:
        model, optimizer = _training(group.rank, check_parameters=said)
        if differ:
            with pytest.raises(CollectiveMismatchError, match=r"=False or ADASUM_CHECK_PARAMETERS"):
                _step(model, optimizer, group.rank)
        else:
            _step(model, optimizer, group.rank)

    for text, said, differ in (
        *(("0", None, False), ("0", True, True), ("1", None, True), ("1", False, False)),
        *(("", None, True), ("maybe", True, True)),
    ):
        monkeypatch.setenv("ADASUM_CHECK_PARAMETERS", text)
        assert hvd.HookState(check_parameters=said).check_parameters == differ
        run_threads(2, partial(job, said=said, differ=differ))


def test_variable_that_is_neither_0_nor_1_raises_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASUM_CHECK_PARAMETERS", "false")
    said = r"^ADASUM_CHECK_PARAMETERS must be 1, .* or 0 .*, got 'false'$"
    with pytest.raises(ValueError, match=said):
        hvd.HookState()

    def job(group: Group) -> None:
        optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
        with pytest.raises(ValueError, match=said):
            hvd.DistributedOptimizer(optimizer)
        # It is left as it was.
        hvd.DistributedOptimizer(optimizer, check_parameters=True)

    run_threads(1, job)


def _bits(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32).view(torch.float32)


LONG = torch.randn(70_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MATRIX = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (torch.zeros(3), -torch.zeros(3)),
        (_bits(0x7FC00000), _bits(0x7FC00001)),
        (LONG, LONG + 2**-30 * (torch.arange(70_000) == 69_999)),
        # Changes of the top bit, which cancel in sums of words.
        (torch.zeros(70_000, dtype=torch.float64), -torch.zeros(70_000, dtype=torch.float64)),
        (LONG, -LONG),
        (torch.zeros(8144), -torch.zeros(8144)),
        # The same values in another order.
        (MATRIX, MATRIX.flip(0)),
        (MATRIX, MATRIX[:, [1, 0, *range(2, 64)]]),
        (MATRIX.half(), MATRIX.half()[[511, *range(1, 511), 0]]),
        (MATRIX.to(torch.complex64), MATRIX.to(torch.complex64) + 1j),
        (torch.ones(5, dtype=torch.bool), torch.tensor([True] * 4 + [False])),
    ],
    ids=[
        *("zero's sign", "NaN's bits", "last bit", "signs of zeros", "signs", "half the signs"),
        *("rows", "columns", "halves", "imaginary part", "bool"),
    ],
)
def test_parameters_that_differ_in_bits_alone_raise_naming_the_first(
    mine: Tensor, other: Tensor
) -> None:
    def job(group: Group) -> str:
        alike = ("alike", torch.full((3,), math.nan))
        # Equal values, laid out otherwise.
        transposed = MATRIX.t().contiguous().t() if group.rank else MATRIX
        theirs = other if group.rank == 2 else mine
        require_equal_parameters(group, [alike, ("transposed", transposed)])
        with pytest.raises(CollectiveMismatchError) as caught:
            require_equal_parameters(group, [alike, ("this one", theirs), ("later", theirs)])
        return str(caught.value)

    texts = run_threads(3, job)
    assert len(set(texts)) == 1
    assert "this one on ranks [2] is not what it is on rank 0" in texts[0]


def test_parameters_in_another_order_or_number_raise_saying_so() -> None:
    def job(group: Group) -> list[str]:
        pairs = [("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))]
        texts = []
        for theirs in (pairs[::-1], pairs[:1], [("a", torch.ones(2, 3)), pairs[1]], []):
            with pytest.raises(CollectiveMismatchError) as caught:
                require_equal_parameters(group, theirs if group.rank else pairs)
            texts.append(str(caught.value))
        return texts

    mine, others = run_threads(2, job)
    assert mine == others
    order, count, shape, none = mine
    assert "the same parameters in another order: parameter 0 is a float32(2, 2) on rank 0" in order
    assert "2 parameters on rank 0 and 1 on rank 1" in count
    assert "other parameters: parameter 0 is a float32(2, 2) on rank 0 and a float32(2, 3)" in shape
    assert "2 parameters on rank 0 and 0 on rank 1" in none


@on_ranks(2)
def test_a_group_of_parameters_added_later_is_compared_and_the_others_are_not(group: Group) -> None:
    model, optimizer = _training(0)
    _step(model, optimizer, group.rank)
    with torch.no_grad():
        # As on hosts whose arithmetic differs in last bits.
        next(model.parameters()).mul_(1.0 + group.rank)
    _step(model, optimizer, group.rank)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2) + group.rank)]})
    with pytest.raises(CollectiveMismatchError, match=r"noname\.1\.0 on ranks \[1\]"):
        _step(model, optimizer, group.rank)


@on_ranks(2)
def test_a_rank_that_joins_before_its_first_step_is_not_compared(group: Group) -> None:
    model, optimizer = _training(0)
    if group.rank == 0:
        _step(model, optimizer, 0)
    hvd.join()


@on_ranks(2)
def test_a_model_converted_on_one_rank_alone_raises_on_every_rank(group: Group) -> None:
    model, optimizer = _training(0)
    if group.rank == 1:
        model[-1].float()
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    said = r"is 2\.weight float64\(3, 5\) on rank 0 and 2\.weight float32\(3, 5\) on rank 1"
    with pytest.raises(CollectiveMismatchError, match=said):
        optimizer.step()
