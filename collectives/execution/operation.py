"""One call on one rank, once it was negotiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives.execution.all_reduce import Runner
from collectives.execution.executor import execute
from collectives.execution.vectors import multiply
from collectives.reducers import Reducer
from collectives.schedules.schedule import Schedule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Operation:
    """One call on one rank.

    Attributes:
        runner: What carries it out.
        options: As in the call's description.
        tensors: This rank's.
        op: The reducer; any for a call that reduces nothing.
        label: What an error calls the call.
        schedule: What is run, for a call that says so itself.
        out: Where the result is written; None for a new tensor.
    """

    runner: Runner
    options: Mapping[str, Any]
    tensors: Sequence[Tensor]
    op: Reducer
    label: str
    schedule: Schedule | None = None
    out: Tensor | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.runner.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.runner.transport.size

    def prescale(self, flat: Tensor) -> None:
        """Multiply by what the call and the operator want before they reduce."""
        multiply(flat, self.factor(flat.dtype))

    def factor(self, dtype: torch.dtype) -> float:
        """Return what `prescale` multiplies by."""
        asked: float = self.options.get("prescale", 1.0)
        return asked * self.op.prescale(dtype, self.size)

    def finish(self, flat: Tensor) -> None:
        """Do to a result what the operator and the call want after they have reduced."""
        self.op.finish(flat, self.size)
        multiply(flat, self.options.get("postscale", 1.0))

    def execute(
        self,
        schedule: Schedule,
        flat: Tensor,
        op: Reducer,
        bounds: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Run a schedule in place, of one rank none."""
        if self.size > 1:
            context = self.runner.context(self.label)
            execute(schedule, flat, op, context, bounds=bounds, ranks=ranks)
