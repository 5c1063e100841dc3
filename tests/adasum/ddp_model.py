"""A model for DistributedDataParallel, and what every rank's gradients of it are defined to become.

Every rank computes all ranks' gradients for itself, on a plain copy of the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from collectives import Reducer
from tests.adasum.definition import relative_error, tolerance, tree
from tests.collectives.operators import ByRank, Longest, TrimmedMean, longest, trimmed

OPS: dict[str, Reducer] = {"Sum": hvd.Sum, "Average": hvd.Average, "Adasum": hvd.Adasum}
USERS = {"Trimmed": TrimmedMean(), "Longest": Longest(), "ByRank": ByRank()}
TINY, HUGE = 1e-5, 1000.0
STEPS = 3
WIDTH = 130


def operator(name: str) -> Reducer:
    return {**OPS, **USERS}[name]


class Net(nn.Module):
    """Its buckets are small enough for "rd" one by one, and in one bucket large enough for "vhdd".

    forward(x, side): without `side` one layer is left out; another one never takes part.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(6, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.side(x)) if side else x)


def loss_of(model: nn.Module, rank: int, step: int, **options: Any) -> Tensor:
    """The loss on this rank's batch of this step, in the model's dtype."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(4, 6, generator=generator).to(dtype)
    y = torch.randn(4, 3, generator=generator)
    return (model(x, **options).float() - y).square().mean()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(model: nn.Module, backward: Callable[[nn.Module], None]) -> list[Tensor]:
    """The gradients of one rank that is alone; zeros where there is none."""
    replica = copy.deepcopy(model)
    replica.zero_grad()
    backward(replica)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in replica.parameters()]


def defined(op: str, columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each parameter's result from all ranks' gradients of it, in float64."""
    if op == "Adasum":
        return [tree([g.reshape(-1) for g in c]).view(c[0].shape) for c in columns]
    if op in USERS:
        rows = [torch.stack([g.double().reshape(-1) for g in c]) for c in columns]
        weights = torch.arange(1.0, len(columns[0]) + 1, dtype=torch.float64)
        apply: dict[str, Callable[[Tensor], Tensor]] = {
            "Trimmed": lambda each: trimmed(each, 1),
            "Longest": lambda each: longest(each, (0, each.shape[1])),
            "ByRank": lambda each: weights @ each,
        }
        return [apply[op](each).view(c[0].shape) for each, c in zip(rows, columns, strict=True)]
    sums = [torch.stack([g.double() for g in c]).sum(0) for c in columns]
    return [s / len(c) if op == "Average" else s for s, c in zip(sums, columns, strict=True)]


def compare(
    got: Sequence[Tensor | None], op: str, columns: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> None:
    """Equal to the definition, for each parameter, and the same bits on every rank."""
    for index, (mine, want, column) in enumerate(
        zip(got, defined(op, columns), columns, strict=True)
    ):
        assert mine is not None, index
        if op == "Adasum":
            error = relative_error(mine, want)
            assert error <= tolerance(dtype), (index, error)
        else:
            # Each of n additions, and one division, rounds by eps/2 of a partial sum's size.
            size = sum(g.double().norm().item() for g in column)
            error = (mine.double() - want).norm().item()
            assert error <= len(column) * torch.finfo(dtype).eps * size, (index, error)
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine), f"parameter {index} differs from rank 0's"


def wrap(
    model: nn.Module, state: str | HookState, *, algorithm: str | None = None, **options: Any
) -> DistributedDataParallel:
    """Under DDP, with the hook: by a state, or by the name of its operator."""
    if isinstance(state, str):
        state = HookState(operator(state), algorithm)
    wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
    wrapped.register_comm_hook(state, ddp_hook)
    return wrapped


def columns_of(
    model: nn.Module, step: int, backward: Callable[[nn.Module, int], None] | None = None
) -> list[list[Tensor]]:
    """For each parameter all ranks' gradients."""

    def simple(replica: nn.Module, rank: int) -> None:
        loss_of(replica, rank, step).backward()

    run = backward or simple
    rows = [plain(model, lambda m, r=rank: run(m, r)) for rank in range(dist.get_world_size())]
    return [list(column) for column in zip(*rows, strict=True)]


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The texts that a logger warns with."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(name).removeHandler(handler)


def run_checks(checks: Sequence[Callable[..., None]], *arguments: Any) -> list[str]:
    """Run the checks one after the other; return their names, or raise with that of the failed."""
    for check in checks:
        try:
            check(*arguments)
        except BaseException as error:
            raise AssertionError(f"{check.__name__}: {error!r}") from error
    return [check.__name__ for check in checks]
