"""The ways to make one step of many ranks' gradients, each as its authors publish it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from evidence.optimizers import LAMB, LARS


@dataclass(frozen=True)
class Method:
    """A way to reduce and to step.

    Attributes:
        label: For tables and plots.
        op: "sum", "average" or "adasum".
        kind: "gradient" or "delta".
        optimizer: "sgd", "momentum" (0.9), "adamw", "lars" or "lamb".
        grid: Six rates to tune among, as multiples of the rate that is best on one rank with this
            optimizer; of LARS and LAMB the rates themselves.
        power: The rate that was tuned at 8 ranks is multiplied by (n/8) to this power at n ranks.
        gain: Whether AdaScale's gain multiplies the rate.
    """

    label: str
    op: str
    kind: str
    optimizer: str
    grid: tuple[float, ...]
    power: float = 0.0
    gain: bool = False

    @property
    def absolute(self) -> bool:
        return self.optimizer in ("lars", "lamb")


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer with its published settings; the rate is set before every step."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1.0)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "lars": LARS, "lamb": LAMB}[name](parameters, lr=1.0)


def powers(first: int, last: int) -> tuple[float, ...]:
    """Return the powers of two from 2**first to 2**last."""
    return tuple(2.0**k for k in range(first, last + 1))


# The rates that are tried on one rank.
BASE_RATES = {"sgd": powers(-6, -1), "momentum": powers(-8, -3), "adamw": powers(-11, -6)}

UP, FLAT, DOWN = powers(0, 5), powers(-2, 3), powers(-3, 2)
SGD = {
    "average-m0": Method("Average, no momentum", "average", "gradient", "sgd", UP, 1.0),
    "average": Method("Average", "average", "gradient", "momentum", UP, 1.0),
    "sum-m0": Method("Sum, no momentum", "sum", "gradient", "sgd", DOWN),
    "sum": Method("Sum", "sum", "gradient", "momentum", DOWN),
    "adascale": Method("AdaScale", "average", "gradient", "momentum", FLAT, gain=True),
    "lars": Method("LARS", "average", "gradient", "lars", powers(0, 5), 1.0),
    "lamb": Method("LAMB", "average", "gradient", "lamb", powers(-8, -3), 0.5),
    "adasum-m0": Method("Adasum, no momentum", "adasum", "gradient", "sgd", FLAT),
    "adasum-gradient": Method("Adasum of gradients", "adasum", "gradient", "momentum", FLAT),
    "adasum-delta": Method("Adasum of deltas", "adasum", "delta", "momentum", FLAT),
}
ADAMW = {
    "average-adamw": Method("Average", "average", "gradient", "adamw", powers(-1, 4), 0.5),
    "lamb": SGD["lamb"],
    "adasum-gradient-adamw": Method(
        "Adasum of gradients", "adasum", "gradient", "adamw", powers(-1, 4)
    ),
    "adasum-delta-adamw": Method("Adasum of deltas", "adasum", "delta", "adamw", FLAT),
}
# Of local steps alone.
LOCAL = {
    "average-delta": Method("Average of deltas", "average", "delta", "momentum", ()),
    "nesterov": Method("Average, outer Nesterov", "average", "delta", "momentum", ()),
    "average-delta-adamw": Method("Average of deltas", "average", "delta", "adamw", ()),
    "nesterov-adamw": Method("Average, outer Nesterov", "average", "delta", "adamw", ()),
}
METHODS = {**SGD, **ADAMW, **LOCAL}
# Multiples of one rank's rate for local steps, by optimizer.
LOCAL_GRIDS = {"momentum": FLAT, "adamw": powers(0, 2)}
