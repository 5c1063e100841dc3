"""Data-parallel ranks simulated in one process: DistributedOptimizer's results, without messages.

Sixteen ranks on two cores spend most of their time waiting for each other. Here their gradients
are computed one rank after the other, and reduced as rows of a matrix by the library's own kernel.
tests/examples/test_one_process.py compares it with DistributedOptimizer on as many ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels

Loss = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class Reduction:
    """How the ranks' gradients become one step.

    Attributes:
        op: "sum", "average" or "adasum".
        method: With "gradient" one optimizer steps by the reduced gradients; with "delta" (Adasum)
            each rank's optimizer steps, and the differences are reduced.
        local_size: Ranks of a node; Adasum runs across nodes, on the average within each.
    """

    op: str
    method: str = "gradient"
    local_size: int = 1

    def __call__(self, rows: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """Reduce rows, [n, P], one a rank, to one, [P]; `bounds` (0, .., P) are the layers'."""
        if self.op == "sum":
            return total(rows)
        if self.op == "average":
            return total(rows) / len(rows)
        nodes = rows.view(-1, self.local_size, rows.shape[1]) / self.local_size
        level = [total(node) for node in nodes]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [kernels.adasum(a, b, bounds) for a, b in pairs]
        return level[0]


def total(rows: Tensor) -> Tensor:
    """Return the rows' sum, in the order of recursive halving: adjacent ranks first."""
    while len(rows) > 1:
        rows = rows[::2] + rows[1::2]
    return rows[0]


class Ranks:
    """Trains one model on `size` ranks, a power of two; its parameters become views of `flat`."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        size: int,
        reduction: Reduction,
    ) -> None:
        if size < 1 or size & (size - 1):
            raise ValueError(f"size must be a power of two, not {size}")
        if size % reduction.local_size:
            raise ValueError(f"local_size {reduction.local_size} does not divide size {size}")
        self.model = model
        self.reduction = reduction
        self._parameters = list(model.parameters())
        numels = [parameter.numel() for parameter in self._parameters]
        self.bounds = (0, *itertools.accumulate(numels))
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])
        for parameter, values in zip(self._parameters, self._views(self.flat), strict=True):
            parameter.data = values
        # Each rank's gradients, and then under the delta method its difference.
        self._rows = self.flat.new_zeros(size, self.bounds[-1])
        count = size if reduction.method == "delta" else 1
        self._optimizers = [make_optimizer(self._parameters) for _ in range(count)]

    def step(self, loss_of: Loss, learning_rate: float) -> float:
        """Take one step on all ranks; return the mean of loss_of(model, rank)."""
        self._rows.zero_()
        losses = []
        for rank, row in enumerate(self._rows):
            self._set_gradients(row)
            loss = loss_of(self.model, rank)
            loss.backward()
            losses.append(loss.item())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        if self.reduction.method == "gradient":
            self._set_gradients(self.reduction(self._rows, self.bounds))
            self._optimizers[0].step()
        else:
            before = self.flat.clone()
            for optimizer, row in zip(self._optimizers, self._rows, strict=True):
                self.flat.copy_(before)
                self._set_gradients(row)
                optimizer.step()
                torch.sub(self.flat, before, out=row)
            torch.add(before, self.reduction(self._rows, self.bounds), out=self.flat)
        return sum(losses) / len(losses)

    def _views(self, row: Tensor) -> list[Tensor]:
        cuts = itertools.pairwise(self.bounds)
        return [
            row[low:high].view(parameter.shape)
            for (low, high), parameter in zip(cuts, self._parameters, strict=True)
        ]

    def _set_gradients(self, row: Tensor) -> None:
        for parameter, gradient in zip(self._parameters, self._views(row), strict=True):
            parameter.grad = gradient
