"""LeNet on digits, one rank of which may be faulty: what the recorder is measured on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import adasum
import collectives
from adasum.gradient_recorder.alarms import Kind

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from train_digits import (
    BATCH,
    LEARNING_RATE,
    TRAINING_IMAGES,
    Digits,
    LeNet,
    schedule,
)

# What is done to a rank's gradients, and the kind of alarm that it should raise.
FAULTS: dict[str, Kind] = {
    "scaled by 4": "scaled",
    "scaled by 1/4": "scaled",
    "duplicated": "duplicated",
    "stuck": "stuck",
    "wild": "wild",
    "zero": "zero",
    "flipped": "flipped",
}
WILD_NORM = 10.0


@dataclass(frozen=True)
class Training:
    """A training, and what is wrong with one of its ranks from the step `begin` on.

    Attributes:
        size: Its ranks.
        seed: Of the first weights and the batches.
        fault: A name of FAULTS, or None.
        epochs: Of the images.
        method: Of DistributedOptimizer.
        momentum: Of SGD.
        images: How many training images are used.
    """

    size: int
    seed: int
    fault: str | None = None
    epochs: int = 8
    method: str = "gradient"
    momentum: float = 0.0
    images: int = TRAINING_IMAGES

    @property
    def steps(self) -> int:
        return self.epochs * (self.images // (self.size * BATCH))

    @property
    def begin(self) -> int:
        """The first faulty step: the start of an odd seed's training, a third of an even one's."""
        return 0 if self.seed % 2 else self.steps // 3

    @property
    def rank(self) -> int:
        """The faulty rank; another one with every seed, and never the one that is copied."""
        return 1 + self.seed % (self.size - 1)


class Fault:
    """Changes a rank's gradients as autograd makes them."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.on = kind, False
        self._first: dict[int, Tensor] = {}
        self._noise = torch.Generator().manual_seed(seed)

    def __call__(self, number: int, gradient: Tensor) -> Tensor:
        """Return what the rank sends in the place of its gradient of parameter `number`."""
        if not self.on:
            return gradient
        if self.kind.startswith("scaled"):
            return gradient * (4.0 if self.kind == "scaled by 4" else 0.25)
        if self.kind == "wild":
            noise = torch.randn(gradient.shape, generator=self._noise)
            return noise * (WILD_NORM / noise.norm())
        if self.kind == "stuck":
            return self._first.setdefault(number, gradient.clone()).clone()
        return {"flipped": -gradient, "zero": 0 * gradient}.get(self.kind, gradient)


def train(
    training: Training, make_observer: Callable[[], Any], **options: Any
) -> tuple[list[Any], float]:
    """Train; return the observer of every rank, and the accuracy on the test images."""
    torch.set_num_threads(1)
    digits = Digits.load(torch.device("cpu"))
    torch.manual_seed(training.seed)
    first = LeNet()
    run = partial(_train_rank, training, digits, first, make_observer, options)
    found = collectives.run_threads(training.size, run)
    return [observer for observer, _ in found], found[0][1]


def _train_rank(
    training: Training,
    digits: Digits,
    first: nn.Module,
    make_observer: Callable[[], Any],
    options: dict[str, Any],
    group: collectives.Group,
) -> tuple[Any, float]:
    model, observer, fault = copy.deepcopy(first), make_observer(), None
    if training.fault is not None and group.rank == training.rank:
        fault = Fault(training.fault, training.seed)
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(partial(fault, number))
    options = {"op": adasum.Adasum, "algorithm": "direct", "method": training.method, **options}
    # A momentum takes steps that are longer by this factor in the end.
    rate = LEARNING_RATE * (1 - training.momentum)
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=training.momentum)
    optimizer = adasum.DistributedOptimizer(sgd, model.named_parameters(), **options)
    optimizer.set_observer(observer)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, training.steps))
    shuffle = torch.Generator().manual_seed(training.seed + 1000)
    an_epoch = training.steps // training.epochs
    for step in range(training.steps):
        if step % an_epoch == 0:
            order = torch.randperm(training.images, generator=shuffle)
        rank = group.rank
        if fault is not None:
            fault.on = step >= training.begin
            if fault.on and fault.kind == "duplicated":
                rank = 0
        batch = order[rank :: group.size][step % an_epoch * BATCH :][:BATCH]
        optimizer.zero_grad()
        cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
        optimizer.step()
        rates.step()
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return observer, right.float().mean().item()
