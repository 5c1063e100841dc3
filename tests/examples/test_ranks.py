"""Ranks simulated in one process compute what DistributedOptimizer computes on ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import adasum as hvd
import collectives
from tests.adasum.definition import (
    OPTIMIZERS,
    flat,
    loss_of,
    make_model,
    relative_error,
    trajectory_tolerance,
    tree,
)

STEPS = 4
# Of all ranks' steps the last: the rate changes from step to step.
RATES = [0.02 * (step + 1) for step in range(STEPS)]


@pytest.fixture
def ranks(load):
    return load("evidence.ranks")


@pytest.fixture
def one_thread(load):
    """Each rank's arithmetic is the same whether others run beside it or not."""
    torch.set_num_threads(1)


def in_one_process(module, reduction, kind: str, size: int, make, loss, **options) -> torch.Tensor:
    ranks = module.Ranks(make(), OPTIMIZERS[kind], size, reduction, **options)
    rows = []
    for step, rate in enumerate(RATES):
        mean = ranks.step(lambda model, rank, step=step: loss(model, rank, step), rate)
        assert mean > 0
        rows.append(flat(ranks.model))
    return torch.stack(rows)


def on_ranks(reduction, kind: str, size: int, make, loss, clip=None, **options) -> torch.Tensor:
    models = [make() for _ in range(size)]
    if reduction.op == "adasum":
        options["method"] = reduction.method
        if not reduction.weighted:
            options["weighted"] = False

    def run(group: collectives.Group) -> torch.Tensor:
        model = models[group.rank]
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()),
            model.named_parameters(),
            op={"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}[reduction.op],
            **options,
        )
        rows = []
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss(model, group.rank, step).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            rows.append(flat(model))
        return torch.stack(rows)

    return collectives.run_threads(size, run)[0]


@pytest.mark.usefixtures("by_messages")  # in shared memory Adasum takes Gram matrices
@pytest.mark.parametrize(
    "size", [2, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 16))]
)
@pytest.mark.parametrize(
    ("op", "method", "kind", "clip"),
    [
        ("sum", "gradient", "momentum", 0.5),
        ("average", "gradient", "adamw", None),
        ("adasum", "gradient", "momentum", 0.5),
        ("adasum", "delta", "adamw", 0.5),
    ],
)
def test_simulated_ranks_have_the_bits_of_recursive_doubling(
    load, ranks, one_thread, op, method, kind, clip, size
):
    lenet = load("train_digits").LeNet

    def make() -> torch.nn.Module:
        torch.manual_seed(5)
        return lenet()

    def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        images = torch.rand(4, 1, 8, 8, generator=generator)
        return cross_entropy(model(images), torch.randint(10, (4,), generator=generator))

    simulated = ranks.Reduction(op, method)
    real = ranks.Reduction(op, method)
    got = in_one_process(ranks, simulated, kind, size, make, loss, clip=clip)
    want = on_ranks(real, kind, size, make, loss, clip=clip, algorithm="rd")
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("size", [3, 6])
def test_simulated_ranks_without_weights_equal_the_unweighted_optimizer(ranks, size):
    reduction = ranks.Reduction("adasum", "delta", weighted=False)
    got = in_one_process(ranks, reduction, "momentum", size, make_model, loss_of)
    want = on_ranks(reduction, "momentum", size, make_model, loss_of)
    assert relative_error(got, want) <= trajectory_tolerance(STEPS)
    weighted = in_one_process(
        ranks, ranks.Reduction("adasum", "delta"), "momentum", size, make_model, loss_of
    )
    assert relative_error(got, weighted) > 1e3 * trajectory_tolerance(STEPS)


@pytest.mark.parametrize(("op", "period"), [("adasum", 2), ("average", 2), ("average", 4)])
def test_simulated_local_steps_equal_their_definition(ranks, op, period):
    """Every rank's own optimizer steps, and the difference since the last reduction is reduced."""
    simulated = ranks.Ranks(make_model(), OPTIMIZERS["adamw"], 4, ranks.Reduction(op, "delta"))
    models = [make_model() for _ in range(4)]
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    for first in range(0, STEPS, period):
        steps = range(first, first + period)
        simulated.local_steps(
            [lambda model, rank, s=s: loss_of(model, rank, s) for s in steps],
            [RATES[s] for s in steps],
        )
        start = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in steps:
                optimizer.param_groups[0]["lr"] = RATES[step]
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
        for before, column in zip(
            start, zip(*(list(m.parameters()) for m in models), strict=True), strict=True
        ):
            deltas = [(each.detach() - before).view(-1) for each in column]
            whole = tree(deltas) if op == "adasum" else sum(deltas) / 4
            for each in column:
                each.data.copy_(before + whole.view_as(before))
    want = flat(models[0])
    assert relative_error(flat(simulated.model), want) <= trajectory_tolerance(STEPS)


def test_adasum_of_some_layers_averages_the_others(ranks):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    bounds = (0, 3, 7, 10)
    got = ranks.Reduction("adasum", layers=(1,))(rows, bounds)
    adasum, mean = (ranks.Reduction(op)(rows, bounds) for op in ("adasum", "average"))
    assert torch.equal(got[3:7], adasum[3:7])
    assert torch.equal(got[:3], mean[:3])
    assert torch.equal(got[7:], mean[7:])
    assert not torch.equal(adasum, mean)


def test_ranks_with_arguments_that_do_not_fit_raise(ranks):
    reduction = ranks.Reduction
    with pytest.raises(ValueError, match="size must be positive, got 0"):
        ranks.Ranks(make_model(), OPTIMIZERS["sgd"], 0, reduction("sum"))
    with pytest.raises(ValueError, match="gain is for the gradient method"):
        ranks.Ranks(
            make_model(), OPTIMIZERS["sgd"], 2, reduction("adasum", "delta"), gain=lambda rows: 1.0
        )
    with pytest.raises(ValueError, match="outer is for the delta method"):
        ranks.Ranks(make_model(), OPTIMIZERS["sgd"], 2, reduction("sum"), outer=lambda step: step)
