"""Ranks simulated in one process compute what DistributedOptimizer computes on ranks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import adasum as hvd
import collectives
from tests.adasum.definition import (
    OPTIMIZERS,
    flat,
    loss_of,
    make_model,
    relative_error,
    trajectory_tolerance,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4
# Of all ranks' steps the last: the rate changes from step to step.
RATES = [0.02 * (step + 1) for step in range(STEPS)]


@pytest.fixture
def one_process(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("one_process")


def in_one_process(one_process, reduction, kind: str, size: int) -> torch.Tensor:
    ranks = one_process.Ranks(make_model(), OPTIMIZERS[kind], size, reduction)
    rows = []
    for step, rate in enumerate(RATES):
        losses = [loss_of(ranks.model, rank, step).item() for rank in range(size)]
        mean = ranks.step(lambda model, rank, step=step: loss_of(model, rank, step), rate)
        assert mean == pytest.approx(sum(losses) / size)
        rows.append(flat(ranks.model))
    return torch.stack(rows)


def on_ranks(op: str, method: str, kind: str, size: int, local_size: int) -> torch.Tensor:
    def run(group: collectives.Group) -> torch.Tensor:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()),
            model.named_parameters(),
            op={"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}[op],
            algorithm="rechd/vhdd" if local_size > 1 else None,
            **({"method": method} if op == "adasum" else {}),
        )
        rows = []
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
            rows.append(flat(model))
        return torch.stack(rows)

    return collectives.run_threads(size, run, local_size=local_size if local_size > 1 else None)[0]


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("op", "method", "size", "local_size"),
    [
        ("sum", "gradient", 4, 1),
        ("average", "gradient", 4, 1),
        ("adasum", "gradient", 1, 1),
        ("adasum", "gradient", 4, 1),
        ("adasum", "gradient", 8, 2),
        ("adasum", "delta", 4, 1),
        ("adasum", "delta", 16, 1),
        ("adasum", "delta", 8, 2),
        ("adasum", "delta", 8, 4),
    ],
)
def test_one_process_example_equals_the_distributed_optimizer(
    one_process, op, method, size, local_size, kind
):
    reduction = one_process.Reduction(op, method, local_size)
    got = in_one_process(one_process, reduction, kind, size)
    want = on_ranks(op, method, kind, size, local_size)
    assert relative_error(got, want) <= trajectory_tolerance(STEPS)


def test_one_process_example_with_unsupported_sizes_raises(one_process):
    with pytest.raises(ValueError, match="power of two, not 3"):
        one_process.Ranks(make_model(), OPTIMIZERS["sgd"], 3, one_process.Reduction("sum"))
    with pytest.raises(ValueError, match="local_size 4 does not divide size 2"):
        one_process.Ranks(
            make_model(), OPTIMIZERS["sgd"], 2, one_process.Reduction("adasum", "delta", 4)
        )
