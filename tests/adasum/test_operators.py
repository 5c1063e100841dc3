"""Training with an operator that a user wrote: what plain torch does with its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from adasum import HookState
from collectives import Group, Reducer
from tests.adasum.definition import (
    Apply,
    make_model,
    relative_error,
    trajectory,
    trajectory_tolerance,
)
from tests.adasum.jobs import on_ranks, take_steps, wrapped
from tests.collectives.operators import ByRank, Longest, TrimmedMean, longest, trimmed

STEPS = 4
# Each operator with its definition on the gathered values of one parameter.
OPERATORS: dict[str, tuple[Reducer, Apply]] = {
    "trimmed": (TrimmedMean(), lambda rows: trimmed(torch.stack(list(rows)), 1)),
    "trimmed, shared": (
        TrimmedMean(shared=True),
        lambda rows: trimmed(torch.stack(list(rows)), 1),
    ),
    "longest": (Longest(), lambda rows: longest(torch.stack(list(rows)), (0, rows[0].numel()))),
    "by rank": (
        ByRank(),
        lambda rows: torch.stack([(i + 1) * row for i, row in enumerate(rows)]).sum(0),
    ),
}


def train(op: Reducer, kind: str, **options: Any) -> Tensor:
    model = make_model()
    optimizer = wrapped(model, kind, op=op, **options)
    return take_steps(model, optimizer, STEPS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"algorithm": "bruck"},
        {"algorithm": "psgpu#2"},
        {"mode": "owners"},
        {"method": "gradient"},
        {"method": "delta"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPERATORS)
def test_optimizer_with_a_users_operator_does_as_torch_on_gathered_values(
    name: str, options: dict[str, Any]
) -> None:
    op, apply = OPERATORS[name]
    method = options.get("method", "gradient")
    if method == "delta" and not op.averages:
        with pytest.raises(ValueError, match=f"a {op} of steps overshoots"):
            collectives.run_threads(1, lambda group: train(op, "sgd", **options))
        return
    for size, kind in ((3, "momentum"), (5, "adam")):
        results = collectives.run_threads(size, lambda group, k=kind: train(op, k, **options))
        want = trajectory(apply, kind, size, 1, STEPS, method=method)[-1]
        assert relative_error(results[0], want) <= trajectory_tolerance(STEPS)
        assert all(torch.equal(result, results[0]) for result in results)


class Silent(TrimmedMean):
    averages = None


@pytest.mark.parametrize("op", [Silent(), hvd.Max], ids=str)
@on_ranks(2)
def test_operator_that_does_not_say_whether_it_averages_is_refused_by_name(
    group: Group, op: Reducer
) -> None:
    with pytest.raises(ValueError, match="set its `averages` to True if equal"):
        wrapped(make_model(), op=op)
    with pytest.raises(ValueError, match="set its `averages` to True if equal"):
        HookState(op=op)


@on_ranks(2)
def test_gradient_through_a_users_operator_is_refused(group: Group) -> None:
    with pytest.raises(NotImplementedError, match=r"op=TrimmedMean\(1\) are not supported"):
        hvd.allreduce(torch.ones(2, requires_grad=True), op=TrimmedMean())
    assert hvd.allreduce(torch.ones(2), op=TrimmedMean()).tolist() == [1.0, 1.0]
