"""Data-parallel ranks simulated in one process: DistributedOptimizer's results, without messages.

Sixteen ranks on two cores spend most of their time waiting for each other. Here their gradients
are computed one rank after the other, and reduced as rows of a matrix by the library's own kernel,
in the tree of "rd" and "vhdd": of n ranks, P the largest power of two in n, the first 2(n - P) pair
first, and the P results are the leaves of a balanced tree.
tests/examples/test_ranks.py compares it with DistributedOptimizer on as many ranks: the same bits
in float32 under algorithm="rd" by messages, which sends whole vectors as is done here. "vhdd" adds
up each dot product in parts, and ranks that share memory take a Gram matrix for Adasum: both differ
in float32's rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels

Loss = Callable[[nn.Module, int], Tensor]
Outer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """How the ranks' gradients become one step.

    Attributes:
        op: "sum", "average" or "adasum".
        method: With "gradient" one optimizer steps by the reduced gradients; with "delta" (Adasum
            and Average) each rank's optimizer steps, and the differences are reduced.
        weighted: Adasum weighs a pair by the ranks behind both sides. It makes a difference where
            the number of ranks is no power of two.
        layers: With Adasum, the numbers of the parameters that it reduces, None for all; the others
            are averaged.
    """

    op: str
    method: str = "gradient"
    weighted: bool = True
    layers: tuple[int, ...] | None = None

    def __call__(self, rows: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """Reduce rows, [n, P], one a rank, to one, [P]; `bounds` (0, .., P) are the layers'."""
        if self.op == "sum":
            return total(rows)
        if self.op == "average":
            return total(rows) / len(rows)
        both = self._adasum(list(rows), bounds)
        if self.layers is None:
            return both
        mean = total(rows) / len(rows)
        for layer in self.layers:
            cut = slice(*bounds[layer : layer + 2])
            mean[cut] = both[cut]
        return mean

    def _adasum(self, vectors: list[Tensor], bounds: tuple[int, ...]) -> Tensor:
        def pair(one: tuple[Tensor, int], other: tuple[Tensor, int]) -> tuple[Tensor, int]:
            (a, p), (b, q) = one, other
            if p == q or not self.weighted:
                return kernels.adasum(a, b, bounds), p + q
            return kernels.adasum(a, b, bounds, weights=(p, q)), p + q

        return in_tree([(vector, 1) for vector in vectors], pair)[0]


def in_tree(leaves, pair):
    """Return `pair` over the leaves as recursive halving folds and pairs them."""
    power = 1 << (len(leaves).bit_length() - 1)
    folded = 2 * (len(leaves) - power)
    heads = zip(leaves[:folded:2], leaves[1:folded:2], strict=True)
    level = [*(pair(a, b) for a, b in heads), *leaves[folded:]]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def total(rows: Tensor) -> Tensor:
    """Return the rows' sum, in the order of recursive halving: adjacent ranks first."""
    return in_tree(list(rows), torch.add)


class Ranks:
    """Trains one model on `size` ranks; its trained parameters become views of `flat`.

    Args:
        model: The model of all ranks, whose buffers do not change.
        make_optimizer: Makes one of the parameters; under the delta method, one for each rank.
        size: The ranks.
        reduction: How their gradients, or differences, become one.
        clip: Longest gradient, by the norm of all parameters: of the reduced gradient, or under the
            delta method of each rank's own. None does not clip.
        gain: Takes the ranks' gradients, [size, P], and returns a factor on the rate.
        outer: Takes the reduced difference and returns the one to take; for the delta method.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        size: int,
        reduction: Reduction,
        *,
        clip: float | None = None,
        gain: Callable[[Tensor], float] | None = None,
        outer: Outer | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        if reduction.method == "delta" and gain is not None:
            raise ValueError("gain is for the gradient method: a difference has a rate already")
        if reduction.method != "delta" and outer is not None:
            raise ValueError("outer is for the delta method")
        self.model, self.reduction = model, reduction
        self._clip, self._gain, self._outer = clip, gain, outer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        numels = [parameter.numel() for parameter in self._parameters]
        self.bounds = (0, *itertools.accumulate(numels))
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        for parameter, values in zip(self._parameters, self._views(self.flat), strict=True):
            parameter.data = values
        # Each rank's gradients, and then under the delta method its difference.
        self.rows = self.flat.new_zeros(size, self.bounds[-1])
        count = size if reduction.method == "delta" else 1
        self._optimizers = [make_optimizer(self._parameters) for _ in range(count)]
        # What the last step reduced, for observers.
        self.reduced = self.flat.new_zeros(self.bounds[-1])

    def step(self, loss_of: Loss, learning_rate: float) -> float:
        """Take one step on all ranks; return the mean of loss_of(model, rank)."""
        if self.reduction.method == "delta":
            return self.local_steps([loss_of], [learning_rate])
        losses = [self._backward(loss_of, rank) for rank in range(len(self.rows))]
        self.reduced = self.reduction(self.rows, self.bounds)
        factor = self._gain(self.rows) if self._gain else 1.0
        self._set_gradients(self.reduced)
        self._take_step(self._optimizers[0], learning_rate * factor)
        return sum(losses) / len(losses)

    def local_steps(self, losses_of: list[Loss], learning_rates: list[float]) -> float:
        """Take one step a loss on each rank by itself, then reduce the difference they made."""
        before = self.flat.clone()
        losses = []
        for rank, optimizer in enumerate(self._optimizers):
            self.flat.copy_(before)
            for loss_of, rate in zip(losses_of, learning_rates, strict=True):
                losses.append(self._backward(loss_of, rank))
                self._take_step(optimizer, rate)
            torch.sub(self.flat, before, out=self.rows[rank])
        self.reduced = self.reduction(self.rows, self.bounds)
        step = self._outer(self.reduced) if self._outer else self.reduced
        torch.add(before, step, out=self.flat)
        return sum(losses) / len(losses)

    def _backward(self, loss_of: Loss, rank: int) -> float:
        row = self.rows[rank].zero_()
        self._set_gradients(row)
        loss = loss_of(self.model, rank)
        loss.backward()
        return loss.item()

    def _take_step(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    def _views(self, row: Tensor) -> list[Tensor]:
        cuts = itertools.pairwise(self.bounds)
        return [
            row[low:high].view(parameter.shape)
            for (low, high), parameter in zip(cuts, self._parameters, strict=True)
        ]

    def _set_gradients(self, row: Tensor) -> None:
        for parameter, gradient in zip(self._parameters, self._views(row), strict=True):
            parameter.grad = gradient
