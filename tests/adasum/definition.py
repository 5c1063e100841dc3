"""What Adasum and the distributed optimizers are defined to compute, in one process, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


Leaf = tuple[Tensor, int]
Apply = Callable[[Sequence[Tensor]], Tensor]


def pair(a: Leaf, b: Leaf, bounds: Sequence[int], weighted: bool = True) -> Leaf:
    """adasum(a, b) per segment, written from the formula and from nothing else.

    A Leaf is a vector and how many ranks it stands for, the weight of its coefficient unless both
    are to weigh the same.
    """
    (left, p), (right, q) = a, b
    if not weighted:
        p = q = 1
    out = torch.empty_like(left)
    for low, high in itertools.pairwise(bounds):
        x, y = left[low:high], right[low:high]
        d, xx, yy = (x @ y).item(), (x @ x).item(), (y @ y).item()
        cx = 1.0 - p / (p + q) * d / xx if xx else 1.0
        cy = 1.0 - q / (p + q) * d / yy if yy else 1.0
        out[low:high] = cx * x + cy * y
    return out, p + q


def tree(
    vectors: Sequence[Tensor], bounds: Sequence[int] | None = None, *, weighted: bool = True
) -> Tensor:
    """Adasum of 1-D vectors in rank order: the first 2r fold pairwise, then a balanced tree."""
    bounds = bounds or (0, vectors[0].numel())
    level = [(v.double(), 1) for v in vectors]
    power = 1 << (len(level).bit_length() - 1)
    folded = len(level) - power
    first = [pair(level[2 * i], level[2 * i + 1], bounds, weighted) for i in range(folded)]
    level = first + level[2 * folded :]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1], bounds, weighted) for i in range(0, len(level), 2)]
    return level[0][0]


def line(
    vectors: Sequence[Tensor], bounds: Sequence[int] | None = None, *, weighted: bool = True
) -> Tensor:
    """Adasum of 1-D vectors in rank order, the running result first."""
    bounds = bounds or (0, vectors[0].numel())
    running, *others = [(v.double(), 1) for v in vectors]
    for other in others:
        running = pair(running, other, bounds, weighted)
    return running[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in L2, float64; absolute where want is zero."""
    scale = want.double().norm().item() or 1.0
    return (got.double() - want.double()).norm().item() / scale


def tolerance(dtype: torch.dtype) -> float:
    """The contract's promise on up to 8 ranks: every level rounds once, eps/2 an element, and the
    coefficients, at most 1.5 in size, pass earlier roundings on; 100 eps leaves room."""
    return 100.0 * torch.finfo(dtype).eps


# Where the networks below are and what of, with their batches.
PLACE: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


def make_model(seed: int = 0) -> torch.nn.Sequential:
    """A small network, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model.to(**PLACE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def loss_of(model: torch.nn.Module, rank: int, step: int, turn: int = 0) -> Tensor:
    """The loss on this rank's batch of this step and accumulation turn."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return (model(x.to(**PLACE)) - y.to(**PLACE)).square().mean()


def flat(model: torch.nn.Module) -> Tensor:
    """All parameters, joined."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trajectory(
    op: str | Apply,
    kind: str,
    size: int,
    passes: int,
    steps: int,
    *,
    method: str = "delta",
    local_size: int = 1,
    ends: Sequence[int] = (),
) -> Tensor:
    """Parameters [steps, P] after each step by the definition, no communication involved.

    Sum, Average, and the gradient method: one plain optimizer stepping by the reduced gradients.
    The delta method, of Adasum or an operator of a user's: every rank's own plain optimizer steps
    from the common parameters, and the reduced differences are added. local_size: Adasum of the
    averages over so many neighbours. ends: the steps of each rank, which then joins: zeros.
    """

    def adasum(vectors: Sequence[Tensor]) -> Tensor:
        nodes = [vectors[i : i + local_size] for i in range(0, size, local_size)]
        return tree([torch.stack(list(node)).mean(0) for node in nodes])

    known: dict[str, Apply] = {
        "Sum": lambda vectors: torch.stack(list(vectors)).sum(0),
        "Average": lambda vectors: torch.stack(list(vectors)).mean(0),
        "Adasum": adasum,
    }
    apply = known[op] if isinstance(op, str) else op

    def reduced(values: Sequence[Tensor], step: int) -> Tensor:
        live = [step < end for end in ends or [steps] * size]
        vectors = [each.reshape(-1) * on for each, on in zip(values, live, strict=True)]
        return apply(vectors).view(values[0].shape)

    by_delta = op not in ("Sum", "Average") and method == "delta"
    replicas = [make_model() for _ in range(size)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in replicas]
    rows = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            for turn in range(passes):
                loss_of(model, rank, step, turn).backward()
        columns = list(zip(*(model.parameters() for model in replicas), strict=True))
        for column in columns if not by_delta else ():
            gradient = reduced([p.grad for p in column], step)
            for p in column:
                p.grad = gradient.clone()
        before = [column[0].detach().clone() for column in columns]
        for optimizer in optimizers:
            optimizer.step()
        if by_delta:
            with torch.no_grad():
                for old, column in zip(before, columns, strict=True):
                    delta = reduced([p - old for p in column], step)
                    for p in column:
                        p.copy_(old + delta)
        rows.append(flat(replicas[0]))
    return torch.stack(rows)


def trajectory_tolerance(steps: int) -> float:
    """float64's 100 eps a reduction, carried on by each later step; a step of these small networks
    magnifies a difference by less than 10 (Adam's 1/sqrt(v) is the steepest part), and a wrong
    definition differs by more than 1e-4 from the first step on."""
    return 10.0 * steps * tolerance(torch.float64)
