"""Steps between which users change what torch lets them change, against plain torch.

Every rank steps plain models of all ranks by the definition, and compares its own with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
from collectives import Group, run_threads
from tests.adasum.definition import tolerance, tree
from tests.adasum.jobs import wrapped
from tests.adasum.optimizer.mutations import AFTER, BEFORE, Model, Side, pre_hook, run

STEPS = 7
# The sum is ((0 + 1) + 2), whatever the size: the definition below adds in that order.
SUMS = {"algorithm": "rd"}
WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average, **SUMS},
    "gradient": {"op": hvd.Adasum, "method": "gradient"},
    "owners": {"op": hvd.Average, "mode": "owners", **SUMS},
    "delta": {"op": hvd.Adasum, "method": "delta"},
    "delta in backward": {"op": hvd.Adasum, "step_in_backward": True},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
}


def joined(op: Any, tensors: list[Tensor]) -> Tensor:
    """Return the ranks' tensors reduced by the definition, complex numbers as pairs of real."""
    pairs = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    if op is hvd.Adasum:
        whole = tree([each.reshape(-1) for each in pairs]).view(pairs[0].shape).to(pairs[0].dtype)
    else:
        whole = pairs[0]
        for other in pairs[1:]:
            whole = whole + other
        whole = whole / len(pairs)
    whole = whole.contiguous()
    return torch.view_as_complex(whole) if tensors[0].is_complex() else whole


class Definition:
    """Plain models and optimizers of all ranks, stepped by what a way is defined to do."""

    def __init__(self, way: str, kind: str, size: int) -> None:
        self.way, self.op = way, WAYS[way]["op"]
        models = [Model() for _ in range(size)]
        self.sides = [Side(each, OPTIMIZERS[kind](each.parameters())) for each in models]

    @property
    def by_gradients(self) -> bool:
        return self.way in ("average", "gradient", "owners")

    def parameters(self) -> list[tuple[Tensor, ...]]:
        """The ranks' parameters, rank by rank for each."""
        return list(zip(*(side.model.parameters() for side in self.sides), strict=True))

    def reduce_gradients(self, mine: Side, rank: int) -> None:
        """Reduce where that is done before the step; what is rounded otherwise is taken over."""
        for column, own in zip(self.parameters(), mine.model.parameters(), strict=True):
            held = {id(p) for g in self.sides[0].optimizer.param_groups for p in g["params"]}
            if not any(p.grad is not None for p in column) or id(column[0]) not in held:
                continue
            if not column[0].requires_grad:
                continue
            values = [torch.zeros_like(p) if p.grad is None else p.grad for p in column]
            reduced = joined(self.op, values)
            if self.op is hvd.Adasum:
                assert own.grad is not None
                # Every level rounds once, so the error is that of the longest operand.
                bound = tolerance(torch.float32) * max(float(each.norm()) for each in values)
                assert float((own.grad - reduced).norm()) <= bound
                reduced = own.grad.detach()
            for p in column:
                if p.grad is None:
                    p.grad = reduced.clone()
                else:
                    p.grad.copy_(reduced)

    @torch.no_grad()
    def step(self, mine: Side) -> None:
        """Take every rank's step, and reduce where that is done after it."""
        for side in self.sides:
            run(side.pre)
        columns = self.parameters()
        start = [[p.clone() for p in column] for column in columns]
        for side in self.sides:
            with torch.enable_grad():
                side.optimizer.step()
        if not self.by_gradients:
            self.install(start, columns)
        for side in self.sides:
            run(side.post)

    def install(self, start: list[list[Tensor]], columns: list[tuple[Tensor, ...]]) -> None:
        for column, values in zip(columns, start, strict=True):
            deltas = [p - before for p, before in zip(column, values, strict=True)]
            value = values[0] + joined(self.op, deltas)
            for p in column:
                p.copy_(value)


def train(
    group: Group, way: str, kind: str, seed: int, only: Callable[[Side], None] | None = None
) -> None:
    """Train by a way with changes drawn by the seed, and compare each step with the definition."""
    draw = random.Random(seed)
    definition = Definition(way, kind, group.size)
    model = Model()
    mine = Side(
        model,
        wrapped(model, OPTIMIZERS[kind], **WAYS[way]),
    )
    # Its local steps are taken in backward, so nothing can be done between that and the step.
    early = way == "delta in backward"
    mine.register(before=not early)
    everyone = [mine, *definition.sides]
    done: list[str] = []
    for number in range(STEPS):
        for change in draw.sample(BEFORE, draw.randrange(3)) + [only] * (only in BEFORE):
            if early and change is pre_hook:
                continue
            done.append(f"{number}: {change.__name__}")
            for side in everyone:
                change(side)
        # Owners refuse to add to what they alone have.
        if way == "owners" or draw.random() < 0.8:
            for side in everyone:
                side.optimizer.zero_grad()
        uneven = draw.random() < 0.3
        data = torch.Generator().manual_seed(1000 * seed + number)
        inputs = [torch.randn(2, 2, 3, 3, generator=data) for _ in range(group.size)]
        for rank, (side, x) in enumerate(zip(definition.sides, inputs, strict=True)):
            side.model(x, (side.head + uneven * rank) % 2).backward()
        model(inputs[group.rank], (mine.head + uneven * group.rank) % 2).backward()
        if definition.by_gradients:
            mine.optimizer.synchronize()
            whole = mine if way != "owners" else definition.sides[group.rank]
            definition.reduce_gradients(whole, group.rank)
        late = [] if early else draw.sample(AFTER, draw.randrange(2)) + [only] * (only in AFTER)
        for change in late:
            done.append(f"{number}: {change.__name__} after backward")
            for side in everyone:
                change(side)
        definition.step(mine)
        with mine.optimizer.skip_synchronize():
            mine.optimizer.step()
        compare(definition, mine, group.rank, f"{way}, {kind}, seed {seed}: {done}")


def compare(definition: Definition, mine: Side, rank: int, what: str) -> None:
    """Compare a rank's parameters, gradients and kept gradients with the definition's."""
    side = definition.sides[rank]
    pairs = zip(mine.model.named_parameters(), definition.parameters(), strict=True)
    for (name, own), column in pairs:
        theirs = column[rank]
        inexact = definition.op is hvd.Adasum and not definition.by_gradients
        if inexact:
            # An addition rounds to half an ulp of the parameter, the difference as above.
            bound = tolerance(torch.float32) * float(
                (own - theirs).detach().norm() + own.detach().norm()
            )
            assert float((own - theirs).norm()) <= bound, (name, what)
            with torch.no_grad():
                for p in column:
                    p.copy_(own)
        else:
            assert torch.equal(own, theirs), (name, what)
        if definition.way != "owners":
            assert (own.grad is None) == (theirs.grad is None), (name, what)
            assert own.grad is None or torch.equal(own.grad, theirs.grad), (name, what)
            for held, kept in zip(mine.kept, side.kept, strict=True):
                for one, other in zip(held[0], kept[0], strict=True):
                    assert (one is None) == (other is None), (name, what)
                    assert one is None or torch.equal(one, other), (name, what)


@pytest.mark.parametrize(
    "seed",
    # Each way once, others at night.
    [pytest.param(seed, marks=() if seed < len(WAYS) else pytest.mark.slow) for seed in range(20)],
)
def test_changes_between_steps_give_the_steps_of_plain_torch(seed: int) -> None:
    draw = random.Random(seed)
    way = list(WAYS)[seed % len(WAYS)]
    kind = draw.choice(sorted(OPTIMIZERS))
    run_threads(draw.choice((2, 2, 3)), lambda group: train(group, way, kind, seed))


# Each way in turn; others at night.
_EACH = [
    pytest.param(
        *(change, way),
        id=f"{change.__name__}-{way}",
        marks=() if number % 3 == turn else pytest.mark.slow,
    )
    for number, change in enumerate([*BEFORE, *AFTER])
    for turn, way in enumerate(("average", "delta", "owners"))
]


@pytest.mark.parametrize(("change", "way"), _EACH)
def test_each_change_between_steps_gives_the_steps_of_plain_torch(
    change: Callable[[Side], None], way: str
) -> None:
    run_threads(2, lambda group: train(group, way, "momentum", 3, change))
