"""The gradient recorder: an observer that records statistics and finds faulty ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from adasum.gradient_recorder.alarms import Alarm, Watch
from adasum.gradient_recorder.statistics import ALL, NoiseScale, Row, StepGrams
from adasum.observer import ObservedGram
from adasum.orthogonality import squared_norms
from collectives import Group, Sum, default_group, is_initialized, validation

_logger = logging.getLogger(__name__)
# For a reduction without Gram matrices: its step, names and this rank's squared norms.
_Norms: TypeAlias = tuple[int, Sequence[str], Tensor]


class RecordedStep(NamedTuple):
    """A recorded step, for callbacks.

    Attributes:
        step: The number of steps that were reduced before.
        rows: One row for all layers together, then one for each layer.
        alarms: The new alarms of this step.
    """

    step: int
    rows: list[Row]
    alarms: list[Alarm]


class _Reduction(NamedTuple):
    """A reduction's numbers, on their way to the host.

    `weights` are the coefficients [S, n] or, without Gram matrices, the results' squared norms [S].
    """

    step: int
    names: Sequence[str]
    products: Tensor
    weights: Tensor
    arrival: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, names: Sequence[str], products: Tensor, weights: Tensor) -> _Reduction:
        """Start copying the numbers to the host, without waiting for a GPU."""
        if not products.is_cuda:
            return cls(step, names, products, weights, None)
        stream, arrival = torch.cuda.current_stream(products.device), torch.cuda.Event()
        products, weights = (each.to("cpu", non_blocking=True) for each in (products, weights))
        arrival.record(stream)
        return cls(step, names, products, weights, arrival)

    def on_host(self) -> tuple[Any, Any, Any]:
        """Wait; return products, the results' squared norms, and whether there are Gram matrices.

        The last is one flag per name.
        """
        if self.arrival is not None:
            self.arrival.synchronize()
        products, weights = self.products.numpy(), self.weights.numpy()
        known = weights.ndim == 2
        if known:
            blended = (products @ weights[:, :, None])[:, :, 0]
            weights = np.maximum((weights * blended).sum(1), 0.0)
        return products, weights, np.full(len(products), known)


class GradientRecorder:
    """Records norms, directions and noise of every rank's gradients, and finds a faulty rank.

    An observer for `set_observer` of `DistributedOptimizer` or `HookState(observer=...)` of DDP,
    with the same arguments on every rank. All ranks get the same rows and alarms; no tensor is
    changed.

    If the reduction computes Gram matrices, as Adasum by `direct` does on two ranks or more, the
    recorder reads no tensor and sends no message. Otherwise it only has norms, by one all-reduce of
    n float64 per tensor: then directions and noise are NaN, wrong directions are not found, and
    "duplicated" means that norms differ by less than 1e-9 of their size.

    The group's first rank logs each new alarm as a WARNING. On CUDA each step is evaluated when the
    next one has ended, so that nothing waits for the GPU; reading rows or alarms waits.

    Args:
        every: Steps from one record to the next; the first step is recorded.
        max_rows: The number of rows to keep, the last ones; each step has one per layer.
        factor: The smallest ratio to the others' norm that may be called "scaled".
        group: The ranks that the observed reductions run over; the default group unless given.
        on_step: Called with each `RecordedStep` on every rank; its exceptions propagate.

    Examples:
        >>> recorder = hvd.GradientRecorder(every=10)
        >>> recorder.rows, recorder.alarms
        ([], [])
    """

    def __init__(
        self,
        every: int = 1,
        *,
        max_rows: int = 100_000,
        factor: float = 2.0,
        group: Group | None = None,
        on_step: Callable[[RecordedStep], object] | None = None,
    ) -> None:
        validation.integer("every", every, 1)
        validation.integer("max_rows", max_rows, 1)
        validation.instance("factor", factor, int | float, "a number above 1")
        validation.instance("group", group, Group | None, "a collectives.Group or None")
        if not factor > 1:
            raise ValueError(f"factor must be a number above 1, got {factor!r}")
        if not (on_step is None or callable(on_step)):
            raise TypeError(f"on_step must be a function of a RecordedStep, got {on_step!r}")
        # Whether the tensors are differences of parameters; `set_observer` sets it.
        self.differences = False
        self._every, self._factor, self._group, self._on_step = every, factor, group, on_step
        self._rows, self._alarms = deque[Row](maxlen=max_rows), deque[Alarm](maxlen=1000)
        # By name: the layer's number, and the last step that contained it.
        self._places, self._seen = {ALL: 0}, dict[str, int]()
        # The number of the running step, its reductions, and the reductions of ended steps.
        self._step, self._open = 0, list[_Reduction]()
        self._closed = deque[list[_Reduction]]()
        # What the two objects below were made for: the number of ranks, and whether tensors are
        # differences of parameters.
        self._known = (0, False)
        self._watch, self._noise = Watch(1, factor), NoiseScale()

    @property
    def rows(self) -> list[Row]:
        """The rows kept, in the order of reduction; each step begins with "all layers"."""
        self._finish()
        return list(self._rows)

    @property
    def alarms(self) -> list[Alarm]:
        """The last 1,000 alarms: each is raised once, and again only after it had ended."""
        self._finish()
        return list(self._alarms)

    def clear(self) -> None:
        """Drop rows and alarms, but keep the evidence on each rank."""
        self._finish()
        self._rows.clear()
        self._alarms.clear()

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> _Norms | None:
        """Keep the squared norms of a reduction without Gram matrices."""
        step = self._count(names)
        if step is None:
            return None
        return step, names, squared_norms([each.detach() for each in tensors])

    def after_reduction(self, token: _Norms | None, tensors: Sequence[Tensor]) -> None:
        """Exchange the norms."""
        if token is None:
            return
        step, names, squares = token
        group = self._group or default_group()
        table = squares.new_zeros(len(squares), group.size)
        table[:, group.rank] = squares
        group.all_reduce(table, Sum, name="gradient recorder's squared norms")
        products = table.new_full((*table.shape, group.size), torch.nan)
        products.diagonal(dim1=1, dim2=2).copy_(table)
        results = squared_norms([each.detach() for each in tensors])
        self._add(_Reduction.of(step, names, products, results))

    def after_gram(self, names: Sequence[str], gram: ObservedGram) -> None:
        """Record a reduction's Gram matrices."""
        step = self._count(names)
        if step is not None:
            self._add(_Reduction.of(step, names, gram.products, gram.coefficients))

    def _count(self, names: Sequence[str]) -> int | None:
        """Count a reduction; return the number of its step, or None if it is not recorded."""
        # No signal tells when steps end: a new one begins when a name comes again.
        if any(self._seen.get(name) == self._step for name in names):
            self._step += 1
        self._seen.update(dict.fromkeys(names, self._step))
        return None if self._step % self._every else self._step

    def _add(self, reduction: _Reduction) -> None:
        """Add a reduction to its step; close the step once it has all known tensors."""
        if self._open and self._open[0].step != reduction.step:
            self._close()
        self._open.append(reduction)
        known = len(self._places) - 1
        if known and sum(len(each.names) for each in self._open) >= known:
            self._close()

    def _close(self) -> None:
        """End the step and evaluate it; on a GPU evaluate the previous step, which is complete."""
        for name in (name for each in self._open for name in each.names):
            self._places.setdefault(name, len(self._places))
        reductions, self._open = self._open, []
        self._closed.append(reductions)
        self._look(int(reductions[-1].arrival is not None))

    def _finish(self) -> None:
        if self._open:
            self._close()
        self._look(0)

    def _look(self, left: int) -> None:
        while len(self._closed) > left:
            reductions = self._closed.popleft()
            names = [name for each in reductions for name in each.names]
            parts = zip(*(each.on_host() for each in reductions), strict=True)
            self._take(StepGrams.of(reductions[0].step, names, *map(np.concatenate, parts)))

    def _take(self, grams: StepGrams) -> None:
        now = grams.norms.shape[1], self.differences
        if self._known != now:
            self._known, self._noise = now, NoiseScale()
            self._watch = Watch(now[0], self._factor, differences=now[1])
        places = np.array([self._places[name] for name in grams.names])
        rows = grams.rows(self._noise.add(places, grams.noise()))
        self._rows.extend(rows)
        news = self._watch.add(places, grams)
        self._alarms.extend(news)
        # The group's first rank logs; all ranks do if the group is unknown.
        group = self._group or (default_group() if is_initialized() else None)
        if group is None or group.size != now[0] or group.rank == 0:
            for alarm in news:
                _logger.warning("%s", alarm)
        if self._on_step is not None:
            self._on_step(RecordedStep(grams.step, rows, news))
