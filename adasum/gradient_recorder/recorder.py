"""The gradient recorder: an observer that keeps what Gram matrices say, and finds faulty ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adasum.gradient_recorder.alarms import Alarm, Watch
from adasum.gradient_recorder.evidence import Bools, Floats, Places
from adasum.gradient_recorder.plot import plot
from adasum.gradient_recorder.rows import RecordedStep, Row, Rows
from adasum.gradient_recorder.statistics import ALL, NoiseScale, StepGrams
from adasum.observer import ObservedGram
from adasum.orthogonality import squared_norms
from adasum.real_pairs import as_reals
from adasum.reducer import Adasum
from collectives import Group, Sum, default_group, is_initialized, validation

_logger = logging.getLogger(__name__)
_MAX_ALARMS = 1000


class _Reduction(NamedTuple):
    """A reduction's numbers, on their way to the host.

    `weights` are the coefficients [S, n], or without Gram matrices the results' squared norms [S].
    """

    names: Sequence[str]
    products: Tensor
    weights: Tensor
    arrival: torch.cuda.Event | None

    @classmethod
    def of(cls, names: Sequence[str], products: Tensor, weights: Tensor) -> _Reduction:
        """Send them, without waiting for a GPU."""
        if not products.is_cuda:
            return cls(names, products, weights, None)
        stream = torch.cuda.current_stream(products.device)
        products, weights = (each.to("cpu", non_blocking=True) for each in (products, weights))
        arrival = torch.cuda.Event()
        arrival.record(stream)
        return cls(names, products, weights, arrival)

    def on_host(self) -> tuple[Floats, Floats, Bools]:
        """Wait for them; return products, the results' squared norms, and whether G is known."""
        if self.arrival is not None:
            self.arrival.synchronize()
        products, weights = self.products.numpy(), self.weights.numpy()
        known = weights.ndim == 2
        squares = weights
        if known:
            blended = (products @ weights[:, :, None])[:, :, 0]
            squares = np.maximum((weights * blended).sum(1), 0.0)
        return products, squares, np.full(len(products), known)


class _Token(NamedTuple):
    """A reduction without Gram matrices, before it: its norms, or copies to make them of."""

    step: int
    names: Sequence[str]
    squares: Tensor | None
    copies: list[Tensor]


class GradientRecorder:
    """Records norms, directions and noise of every rank's gradients, and finds a faulty rank.

    An observer: `optimizer.set_observer(recorder)` of `DistributedOptimizer`, or
    `HookState(observer=recorder)` of DDP; on every rank, with the same arguments. All ranks get the
    same rows and alarms. It never changes a gradient or a step.

    Where the reduction makes Gram matrices, as Adasum by `direct` does on two ranks or more, it
    looks at no tensor and sends no message. Elsewhere it has the norms alone, for one all-reduce of
    n float64 a tensor: then directions and noise are NaN, "wild" and "flipped" are not found but as
    "scaled", and "duplicated" only of equal bits. `copies=True` makes Gram matrices there.

    A new alarm is logged as a WARNING by the group's first rank. What alarms mean, by which test
    they are raised and how seldom one is false: `adasum.gradient_recorder.alarms`. On CUDA a step
    is looked at when the next one is over, so that nothing waits for the GPU; reading waits.

    Args:
        every: Steps from one record to the next; the first step is recorded.
        max_rows: How many rows are kept, one a layer and step: the last ones.
        factor: From which factor on a rank's norm may be called "scaled".
        group: The ranks that the observed reductions run over; the default group unless given.
        copies: Whether to reduce float32 copies with an Adasum of its own where there are no Gram
            matrices.
        on_step: Called with each `RecordedStep` on every rank; what it raises ends the step.

    Raises:
        TypeError: `group` is not a Group, or `on_step` cannot be called.
        ValueError: `every` or `max_rows` is not a positive int, or `factor` not above 1.

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
        copies: bool = False,
        on_step: Callable[[RecordedStep], object] | None = None,
    ) -> None:
        for name, count in (("every", every), ("max_rows", max_rows)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be an int >= 1, not {count!r}")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 1:
            raise ValueError(f"factor must be a number above 1, not {factor!r}")
        if group is not None and not isinstance(group, Group):
            raise TypeError(f"group must be a collectives.Group or None, not {group!r}")
        validation.instance("copies", copies, bool, "a bool")
        if not (on_step is None or callable(on_step)):
            raise TypeError(f"on_step must be a function of a RecordedStep, not {on_step!r}")
        self._every, self._factor, self._group, self._copies = every, factor, group, copies
        self._on_step = on_step
        self._rows, self._alarms = Rows(max_rows), deque[Alarm](maxlen=_MAX_ALARMS)
        self._places: dict[str, int] = {ALL: 0}
        # Of the names of the last step.
        self._same_places: tuple[tuple[str, ...], Places] = (), slice(0, 0)
        self._ranks, self._differences = 1, False
        self._begin()
        # By name the step that had it last, and what of the running step is here.
        self._seen: dict[str, int] = {}
        self._step = 0
        self._open: list[_Reduction] = []
        self._open_step = 0
        self._closed: deque[tuple[int, list[_Reduction]]] = deque()

    def _begin(self) -> None:
        """Know nothing of the ranks."""
        self._watch = Watch(self._ranks, self._factor, differences=self._differences)
        self._noise = NoiseScale()

    @property
    def differences(self) -> bool:
        """Whether differences of parameters are recorded; `set_observer` says so."""
        return self._differences

    @differences.setter
    def differences(self, differences: bool) -> None:
        if differences != self._differences:
            self._finish()
            self._differences = differences
            self._begin()

    @property
    def rows(self) -> list[Row]:
        """The rows kept, in the order of reduction; a step begins with "all layers"."""
        self._finish()
        return list(self._rows)

    @property
    def alarms(self) -> list[Alarm]:
        """The last 1,000 alarms: each is raised once, and again only after it had ended."""
        self._finish()
        return list(self._alarms)

    def clear(self) -> None:
        """Forget rows and alarms; what ranks are known for stays."""
        self._finish()
        self._rows.clear()
        self._alarms.clear()

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to a file, with columns norm_0, ..., agreement_0, ... for the ranks."""
        self._finish()
        self._rows.to_csv(path)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame of the same columns.

        Raises:
            ImportError: pandas is not installed.
        """
        self._finish()
        return self._rows.to_pandas()

    def plot(self, name: str = ALL) -> Any:
        """Draw norms, agreement and noise scale over steps; return the matplotlib Figure.

        Args:
            name: A layer, or "all layers".

        Raises:
            ImportError: matplotlib (the extra `plots`) is not installed.
            ValueError: There is no row of that name.
        """
        rows = [row for row in self.rows if row.name == name]
        if not rows:
            raise ValueError(f"name must be a layer that was recorded, not {name!r}")
        return plot(name, rows, [alarm for alarm in self.alarms if name in alarm.names])

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> _Token | None:
        """Keep the squared norms, or copies, of a reduction without Gram matrices."""
        step = self._count(names)
        if step is None:
            return None
        chosen = [tensor.detach() for tensor in tensors]
        if not self._copies:
            return _Token(step, names, squared_norms(chosen), [])
        copies = [
            as_reals(each.resolve_conj()).to(
                torch.float32, copy=True, memory_format=torch.contiguous_format
            )
            for each in chosen
        ]
        return _Token(step, names, None, copies)

    def after_reduction(self, token: _Token | None, tensors: Sequence[Tensor]) -> None:
        """Exchange the norms, or make the Gram matrices of the copies."""
        if token is None:
            return
        step, names, squares, copies = token
        group = self._group or default_group()
        op = Adasum.observed()
        if copies and group.reduces_by_tree(copies, op, algorithm="direct"):
            group.grouped_all_reduce(copies, op, algorithm="direct", name="gradient recorder")
            gram = op.take_gram()
            assert gram is not None
            self._add(step, _Reduction.of(names, gram.products, gram.coefficients))
            return
        if squares is None:
            squares = squared_norms(copies)
        table = squares.new_zeros(len(squares), group.size)
        table[:, group.rank] = squares
        group.all_reduce(table, Sum, name="gradient recorder's squared norms")
        products = table.new_full((*table.shape, group.size), torch.nan)
        products.diagonal(dim1=1, dim2=2).copy_(table)
        results = squared_norms([tensor.detach() for tensor in tensors])
        self._add(step, _Reduction.of(names, products, results))

    def after_gram(self, names: Sequence[str], gram: ObservedGram) -> None:
        """Record a reduction's Gram matrices."""
        step = self._count(names)
        if step is not None:
            self._add(step, _Reduction.of(names, gram.products, gram.coefficients))

    def _count(self, names: Sequence[str]) -> int | None:
        """Count a reduction; return the number of its step, or None if it is not recorded."""
        # No one says where a step ends: it has when a tensor comes again.
        if any(self._seen.get(name) == self._step for name in names):
            self._step += 1
        self._seen.update(dict.fromkeys(names, self._step))
        return None if self._step % self._every else self._step

    def _add(self, step: int, reduction: _Reduction) -> None:
        """Add a reduction to its step, which is over with the last tensor that is known of."""
        if self._open and self._open_step != step:
            self._close()
        self._open_step = step
        self._open.append(reduction)
        known = len(self._places) - 1
        if known and sum(len(each.names) for each in self._open) >= known:
            self._close()

    def _close(self) -> None:
        """Look at the step that is over; of a GPU's at the one before, which has arrived."""
        for reduction in self._open:
            for name in reduction.names:
                self._places.setdefault(name, len(self._places))
        self._closed.append((self._open_step, self._open))
        left = int(self._open[-1].arrival is not None)
        self._open = []
        self._look(left)

    def _finish(self) -> None:
        """Look at all that has come."""
        if self._open:
            self._close()
        self._look(0)

    def _look(self, left: int) -> None:
        while len(self._closed) > left:
            self._take(*self._closed.popleft())

    def _take(self, step: int, reductions: list[_Reduction]) -> None:
        names = [name for each in reductions for name in each.names]
        parts = zip(*(each.on_host() for each in reductions), strict=True)
        grams = StepGrams.of(step, names, *map(np.concatenate, parts))
        if grams.norms.shape[1] != self._ranks:
            self._ranks = grams.norms.shape[1]
            self._begin()
        places = self._places_of(grams.names)
        self._rows.add(grams, self._noise.add(places, grams.noise()))
        news = self._watch.add(places, grams)
        self._alarms.extend(news)
        if news and self._logs():
            for alarm in news:
                _logger.warning("%s", alarm)
        if self._on_step is not None:
            self._on_step(RecordedStep(step, self._rows.last(), news))

    def _places_of(self, names: tuple[str, ...]) -> Places:
        if self._same_places[0] != names:
            found = np.array([self._places[name] for name in names])
            whole = slice(0, len(found))
            in_order = np.array_equal(found, np.arange(len(found)))
            self._same_places = names, whole if in_order else found
        return self._same_places[1]

    def _logs(self) -> bool:
        """Return whether this rank logs: the first of the ranks, or all where it is not known."""
        group = self._group or (default_group() if is_initialized() else None)
        return group is None or group.size != self._ranks or group.rank == 0

    def __getstate__(self) -> dict[str, Any]:
        # What is on its way from a GPU can be neither copied nor pickled.
        self._finish()
        return self.__dict__
