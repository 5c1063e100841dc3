"""Ranks that ask for different things, or whose parameters come to differ, are told which."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import adasum as hvd
from adasum.optimizer.consistency import parameter_check
from adasum.optimizer.consistency.descriptions import describe_value
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.definition import flat, loss_of, make_model
from tests.adasum.jobs import WAYS, on_ranks, wrapped

SGD = partial(torch.optim.SGD, lr=0.1)
ADASUM = {"op": hvd.Adasum}
# What differs: the options of rank 0's optimizer, rank 1's, and what the error says. With `kind`
# they are of another plain optimizer.
DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rate": ({}, {"kind": partial(torch.optim.SGD, lr=0.2)}, "lr of group 0 is 0.1 on rank 0"),
    "momentum": ({}, {"kind": partial(SGD, momentum=0.9)}, "momentum of group 0 is 0.0"),
    "class": ({}, {"kind": torch.optim.Adam}, "class is torch.optim.sgd.SGD on rank 0"),
    "a tensor": (
        {"kind": partial(torch.optim.Adam, lr=torch.tensor(0.25))},
        {"kind": partial(torch.optim.Adam, lr=torch.tensor(0.5))},
        "lr of group 0 is 0.25 on rank 0 and 0.5 on rank 1",
    ),
    "passes": ({}, {"backward_passes_per_step": 2}, "per_step is 1 on rank 0 and 2 on rank 1"),
    "op": ({"op": hvd.Sum}, {}, "op is Sum on rank 0"),
    "weights": (
        ADASUM,
        {**ADASUM, "weighted": False},
        "op is Adasum on rank 0 and Adasum(weighted=False) on rank 1",
    ),
    "method": (
        ADASUM,
        {**ADASUM, "method": "gradient"},
        "the method is DeltaMethod on rank 0 and GradientMethod on rank 1",
    ),
    "mode": ({"mode": "owners"}, {}, "the method is OwnersMethod on rank 0"),
    "compression": ({}, {"compression": hvd.Compression.bf16}, "compression is "),
    "algorithm": ({"algorithm": "rd"}, {}, "algorithm is 'rd' on rank 0 and None"),
    "check_every": ({}, {"check_every": 7}, "check_every is 100 on rank 0 and 7"),
    "sparse_as_dense": ({}, {"sparse_as_dense": True}, "sparse_as_dense is False"),
    "predivide": ({}, {"gradient_predivide_factor": 2.0}, "predivide_factor is 1.0 on rank 0"),
}


def _step(optimizer: Any, model: torch.nn.Module, rank: int, number: int = 0) -> None:
    optimizer.zero_grad()
    for turn in range(optimizer.backward_passes_per_step):
        loss_of(model, rank, number, turn).backward()
    optimizer.step()


@pytest.mark.parametrize("what", DIFFERING)
def test_settings_that_differ_raise_at_the_first_step_on_every_rank(what: str) -> None:
    *sides, said = DIFFERING[what]

    def run(group: Group) -> str:
        model = make_model()
        before = flat(model)
        optimizer = wrapped(model, **sides[group.rank])
        with pytest.raises(CollectiveMismatchError) as caught:
            _step(optimizer, model, group.rank)
        assert torch.equal(before, flat(model))
        return str(caught.value)

    text, other = run_threads(2, run)
    assert text == other
    assert "the ranks' settings differ before their first reduction: " in text and said in text
    assert "check_parameters=False or ADASUM_CHECK_PARAMETERS=0" in text


@pytest.mark.parametrize("what", ["rate", "momentum", "class", "check_every"])
@on_ranks(2)
def test_settings_that_differ_are_not_compared_with_check_parameters_false(
    group: Group, what: str
) -> None:
    *sides, _ = DIFFERING[what]
    model = make_model()
    optimizer = wrapped(model, check_parameters=False, **sides[group.rank])
    _step(optimizer, model, group.rank)


def test_describe_value_tells_values_apart_and_objects_by_their_class() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert describe_value(endless).count("1.0") > 1
    conjugate = torch.tensor([1j, 2.0]).conj()
    same = [(0.0, -0.0), ({"a": 1, 2: 3}, {2: 3, "a": 1}), (conjugate, conjugate.resolve_conj())]
    same += [(1, 1.0), (np.int64(3), 3.0), ((0.9, 0.99), [0.9, 0.99]), (object(), object())]
    assert all(describe_value(one) == describe_value(other) for one, other in same)
    tensors = [torch.arange(3.0), torch.arange(3.0) + 1, torch.arange(3.0, dtype=torch.float64)]
    values = [0, 1, True, None, "1", 2**60, 2**60 + 1, (1, 2), {"a": 1}, {"a": 2}, 1j, *tensors]
    values += [float("nan"), torch.empty(2, device="meta"), torch.optim.SGD, hvd.Compression.fp16]
    assert len({describe_value(value) for value in values}) == len(values)


def _drift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[0] += 1e-3


@pytest.mark.parametrize("way", [each for each in WAYS if each != "owners"])
def test_parameters_that_come_to_differ_raise_at_the_next_running_check(way: str) -> None:
    def run(group: Group) -> str:
        model = make_model()
        optimizer = wrapped(model, SGD, check_every=4, **WAYS[way])
        for number in range(8):
            _step(optimizer, model, group.rank, number)
        if group.rank == 1:
            _drift(model)
        for number in range(3):
            _step(optimizer, model, group.rank, number)
        with pytest.raises(CollectiveMismatchError) as caught:
            _step(optimizer, model, group.rank, 3)
        return str(caught.value)

    # Local steps carry a difference of the start on, as a difference of each rank's own.
    texts = run_threads(2, run)
    assert texts[0] == texts[1]
    assert "differ after 12 steps: 0.weight on ranks [1] is not what it is on rank 0" in texts[0]
    for cause in ("checkpoint", "ReduceLROnPlateau", "max_norm", "check_every=0"):
        assert cause in texts[0]
    assert "broadcast" not in texts[0]


def test_running_checks_take_turns_over_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 bytes: whichever parameter differs, some check finds it."""
    monkeypatch.setattr(parameter_check, "_PART_BYTES", 64)
    count = len(list(make_model().parameters())) + 1

    def run(group: Group, changed: int) -> None:
        model = make_model()
        transposed = torch.nn.Parameter(torch.zeros(3, 2).t())
        model.register_parameter("transposed", transposed)
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), check_every=1)
        _step(optimizer, model, group.rank)
        if group.rank == 1:
            with torch.no_grad():
                list(model.parameters())[changed][-1].add_(1.0)
        for number in range(count):
            try:
                _step(optimizer, model, group.rank, number)
            except CollectiveMismatchError:
                return
        raise AssertionError("not found")

    for changed in range(count):
        run_threads(2, lambda group, changed=changed: run(group, changed))


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
@on_ranks(1)
def test_check_every_that_is_no_number_of_steps_raises(group: Group, value: Any) -> None:
    with pytest.raises(ValueError, match="check_every must be an int >= 0"):
        hvd.DistributedOptimizer(SGD(make_model().parameters()), check_every=value)
