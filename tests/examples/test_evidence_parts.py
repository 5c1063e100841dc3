"""What the evidence is made of: rivals, intervals, schedule, models."""

from __future__ import annotations

import math

import numpy
import pytest
import torch


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def random_gradients(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]


# A few float64 operations a step, whose roundings grow by less than ten over these steps.
CLOSE = 100 * torch.finfo(torch.float64).eps


def test_lars_takes_the_steps_of_its_paper(load):
    weight = parameter(3.0, -4.0)
    optimizer = load("evidence.optimizers").LARS(
        [weight], lr=2.0, momentum=0.9, weight_decay=0.1, trust=0.5
    )
    w, v = weight.detach().numpy().copy(), numpy.zeros(2)
    for gradient in random_gradients(3, 2):
        g = gradient.numpy()
        local = 0.5 * numpy.linalg.norm(w) / (numpy.linalg.norm(g) + 0.1 * numpy.linalg.norm(w))
        v = 0.9 * v + 2.0 * local * (g + 0.1 * w)
        w = w - v
        weight.grad = gradient
        optimizer.step()
        assert numpy.allclose(weight.detach().numpy(), w, rtol=CLOSE, atol=CLOSE)


def test_lars_moves_a_weight_of_zero(load):
    weight = parameter(0.0, 0.0)
    optimizer = load("evidence.optimizers").LARS([weight], lr=10.0, trust=0.01)
    weight.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.tensor([-0.1, 0.2], dtype=torch.float64))


def test_lamb_takes_the_steps_of_its_paper(load):
    weight = parameter(3.0, -4.0, 0.5)
    optimizer = load("evidence.optimizers").LAMB([weight], lr=0.1, weight_decay=0.2)
    w = weight.detach().numpy().copy()
    m, v = numpy.zeros(3), numpy.zeros(3)
    for step, gradient in enumerate(random_gradients(4, 3), start=1):
        g = gradient.numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        r = m / (1 - 0.9**step) / (numpy.sqrt(v / (1 - 0.999**step)) + 1e-6)
        u = r + 0.2 * w
        w = w - 0.1 * numpy.linalg.norm(w) / numpy.linalg.norm(u) * u
        weight.grad = gradient
        optimizer.step()
        # 1 - 0.999**step loses three digits.
        assert numpy.allclose(weight.detach().numpy(), w, rtol=1e3 * CLOSE)


def test_adascale_gain_follows_its_papers_estimates(load):
    gain = load("evidence.optimizers").AdaScale()
    steps = [torch.stack(random_gradients(4 * (i + 1), 5)[-4:]) for i in range(3)]
    variance = square = 0.0
    for i, rows in enumerate(steps):
        # The textbook's: the sum over coordinates of the sample variance.
        s = rows.var(dim=0, unbiased=True).sum().item()
        m = rows.mean(dim=0).square().sum().item() - s / 4
        keep = 1 - 4 / 1000 if i else 0.0
        variance, square = keep * variance + (1 - keep) * s, keep * square + (1 - keep) * m
        want = (variance + max(square, 0)) / (variance / 4 + max(square, 0)) if i else 1.0
        assert gain(rows) == pytest.approx(want, rel=100 * CLOSE)


def test_adascale_gain_of_equal_gradients_is_one_and_of_noise_all_ranks(load):
    same, noise = load("evidence.optimizers").AdaScale(), load("evidence.optimizers").AdaScale()
    for _ in range(3):
        equal = same(torch.ones(8, 5, dtype=torch.float64))
        # A mean of zero: the gradient is noise alone.
        opposed = noise(torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(4, 5))
    # The variance is at least 1e-6, beside a squared gradient of 5.
    assert equal == pytest.approx(1.0, abs=1e-6)
    assert opposed == pytest.approx(8.0)


def test_outer_nesterov_steps_as_torch_does_by_the_difference_turned_round(load):
    outer, weight = load("evidence.optimizers").OuterNesterov(0.7, 0.9), parameter(1.0, 2.0)
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    total = weight.detach().clone()
    for difference in random_gradients(4, 2):
        total += outer(difference)
        weight.grad = -difference
        optimizer.step()
        assert torch.allclose(total, weight.detach(), rtol=CLOSE, atol=CLOSE)


def test_interval_of_differences_is_paired_by_seed(load):
    intervals = load("evidence.intervals")
    found = intervals.paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    # Differences 1, 2, 3: mean 2, deviation 1, t of two degrees of freedom 4.303.
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert intervals.interval([5.0]).half == math.inf
    with pytest.raises(ValueError, match="got 0"):
        intervals.interval([])


@pytest.mark.parametrize(
    ("mean", "half", "score", "want"),
    [
        (0.02, 0.005, "accuracy", "better"),
        (-0.02, 0.005, "accuracy", "worse"),
        (0.1, 0.05, "loss", "worse"),
        (-0.1, 0.05, "loss", "better"),
        (0.002, 0.005, "accuracy", "level"),
        (0.004, 0.003, "accuracy", "level"),
        (0.002, 0.05, "accuracy", "not separated"),
        (0.02, math.inf, "accuracy", "not separated"),
    ],
)
def test_verdict_follows_from_interval_and_margin(load, mean, half, score, want):
    intervals = load("evidence.intervals")
    assert intervals.verdict(intervals.Interval(mean, half), score) == want
