"""Steps inside a mode of the user's: it sees the model and the optimizer, not the reductions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import Group, run_threads
from tests.adasum.definition import flat, loss_of, make_model
from tests.adasum.jobs import ways, wrapped

WAYS = ways("average", "gradient", "delta", "owners")


class Counting(TorchDispatchMode):
    """Counts what torch dispatches in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    """Passes everything on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def train(group: Group, way: str, mode: Any = None) -> Tensor:
    model = make_model()
    optimizer = wrapped(model, "momentum", check_every=2, **WAYS[way])
    for step in range(4):
        # The first step without, the others within.
        if mode is not None and step:
            mode.__enter__()
        optimizer.zero_grad()
        loss_of(model, group.rank, step).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if mode is not None and step:
            mode.__exit__(None, None, None)
    return flat(model)


@pytest.mark.parametrize("mode", [Counting, Passing])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_inside_a_mode_is_the_step_without_it(way: str, mode: Any) -> None:
    plain = run_threads(2, lambda group: train(group, way))
    # One rank alone is in it.
    within = run_threads(2, lambda group: train(group, way, mode() if group.rank else None))
    assert torch.equal(within[0], within[1]) and torch.equal(within[0], plain[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_mode_sees_the_wrapped_optimizers_own_operations(way: str) -> None:
    def run(group: Group) -> Counter[str]:
        mode = Counting()
        train(group, way, mode)
        return mode.seen

    seen = run_threads(2, run)
    assert all(each["aten.addmm.default"] for each in seen)
    assert all(any(name.startswith("aten.add_.Tensor") for name in each) for each in seen)
