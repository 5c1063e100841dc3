"""A small model that ranks train, with the recorder as its observer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import adasum
from adasum import GradientRecorder
from collectives import Group
from tests.adasum.jobs import wrapped

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    # Ranks are threads, which share torch's own generator.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, generator=generator)
    return model


def train(
    group: Group,
    recorder: GradientRecorder | None,
    steps: int,
    change: Callable[[Tensor], Tensor] = lambda gradient: gradient,
    **options: Any,
) -> list[list[Tensor]]:
    """Train; return each step's gradients of this rank before the reduction, by NAMES."""
    model, sent = make_model(), []
    given = {"op": adasum.Adasum, "method": "gradient", "algorithm": "direct", "groups": 2}
    optimizer = wrapped(model, partial(torch.optim.SGD, lr=0.01), **given | options)
    optimizer.set_observer(recorder)
    for step in range(steps):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + group.rank))
        parameters = list(model.parameters())
        found = torch.autograd.grad(model(inputs).square().mean(), parameters)
        sent.append([change(gradient).double().flatten() for gradient in found])
        optimizer.zero_grad()
        hooks = [parameter.register_hook(change) for parameter in parameters]
        model(inputs).square().mean().backward()
        optimizer.step()
        for hook in hooks:
            hook.remove()
    return sent
