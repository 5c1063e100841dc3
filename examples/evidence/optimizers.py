"""The rivals that neither torch nor this library has: LARS, LAMB, AdaScale, an outer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling. Source: You, Gitman and Ginsburg, arXiv 1708.03888.

    v = momentum * v + lr * rate * (g + decay * w), w = w - v, with each parameter's own
    rate = trust * |w| / (|g| + decay * |w|). Where w or g is zero, rate is `trust`, as if they were
    equally long: a bias that starts at zero would never move.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            decay, trust = group["weight_decay"], group["trust"]
            for weight in group["params"]:
                length, slope = weight.norm().item(), weight.grad.norm().item()
                alike = length == 0.0 or slope == 0.0
                rate = trust if alike else trust * length / (slope + decay * length)
                state = self.state[weight]
                if not state:
                    state["velocity"] = torch.zeros_like(weight)
                step = weight.grad.add(weight, alpha=decay)
                state["velocity"].mul_(group["momentum"]).add_(step, alpha=group["lr"] * rate)
                weight.sub_(state["velocity"])


class LAMB(torch.optim.Optimizer):
    """Adam's step, as long as the layer's weights. Source: You et al., arXiv 1904.00962, Alg. 2.

    r = m' / (sqrt(v') + eps) + decay * w with Adam's bias-corrected moments m' and v', and
    w = w - lr * |w| / |r| * r; where w or r is zero, w - lr * r.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["steps"] = 0
                    state["mean"], state["square"] = (torch.zeros_like(weight) for _ in range(2))
                state["steps"] += 1
                gradient, steps = weight.grad, state["steps"]
                state["mean"].lerp_(gradient, 1 - first)
                state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                mean = state["mean"] / (1 - first**steps)
                root = (state["square"] / (1 - second**steps)).sqrt_().add_(group["eps"])
                step = mean.div_(root).add_(weight, alpha=group["weight_decay"])
                length, own = weight.norm().item(), step.norm().item()
                ratio = length / own if length and own else 1.0
                weight.sub_(step, alpha=group["lr"] * ratio)


class AdaScale:
    """The factor on SGD's rate by the gradients' variance.

    Of S ranks' gradients: s = (sum |g|^2 - S |mean|^2) / (S - 1), the variance of one, and
    m = |mean|^2 - s / S, the square of the true gradient. Both are averaged over steps with the
    factor max(1 - S / 1000, 0), s is at least 1e-6 and m at least 0, and the gain is
    (s + m) / (s / S + m), from 1 (no noise) to S (nothing else). The first step's is 1.
    Source: Johnson et al., arXiv 2007.05105.

    Its authors train until the gains add up to one rank's steps. Here all methods see the same
    examples, so the gain multiplies the rate of the common schedule.
    """

    def __init__(self) -> None:
        self.variance = self.square = 0.0
        self._steps = 0

    def __call__(self, rows: Tensor) -> float:
        count = len(rows)
        if count == 1:
            return 1.0
        variance, square = noise(rows)
        keep = max(1.0 - count / 1000, 0.0) if self._steps else 0.0
        self._steps += 1
        self.variance = keep * self.variance + (1 - keep) * variance
        self.square = keep * self.square + (1 - keep) * square
        if self._steps == 1:
            return 1.0
        s, m = max(self.variance, 1e-6), max(self.square, 0.0)
        return (s + m) / (s / count + m)


def noise(rows: Tensor) -> tuple[float, float]:
    """Return the variance of one rank's gradient and the squared true gradient; 2 ranks or more."""
    count = len(rows)
    own = sum(row.dot(row).item() for row in rows)
    mean = rows.mean(dim=0)
    length = mean.dot(mean).item()
    variance = (own - count * length) / (count - 1)
    return variance, length - variance / count


class OuterNesterov:
    """SGD with Nesterov's momentum on the reduced difference of H local steps.

    As DiLoCo has it (Douillard et al., arXiv 2311.08105), rate 0.7 and momentum 0.9: the
    difference, turned round, is the gradient.
    """

    def __init__(self, rate: float = 0.7, momentum: float = 0.9) -> None:
        self.rate, self.momentum = rate, momentum
        self._velocity: Tensor | None = None

    def __call__(self, difference: Tensor) -> Tensor:
        """Return the difference to take, [P]."""
        if self._velocity is None:
            self._velocity = torch.zeros_like(difference)
        self._velocity.mul_(self.momentum).add_(difference)
        return self.rate * (difference + self.momentum * self._velocity)
