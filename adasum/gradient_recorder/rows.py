"""Rows of recorded steps, in bounded memory: as tuples, CSV or a pandas DataFrame."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adasum.gradient_recorder.alarms import Alarm
from adasum.gradient_recorder.evidence import Floats
from adasum.gradient_recorder.statistics import StepGrams


class Row(NamedTuple):
    """What one step says of one layer, or of all layers together.

    Attributes:
        step: How many steps were reduced before.
        name: The layer's name, or "all layers": of those whose Gram matrices are known, if any are.
        norms: Of each rank's gradient.
        agreements: The median cosine of each rank's gradient and the others'; NaN of zeros, of what
            is not finite, and where norms alone are known.
        orthogonality: The result's squared norm, divided by the sum of the gradients', as
            `adasum.orthogonality` has it.
        noise_scale: The simple noise scale, in batches of a rank, over the last ten steps or so;
            inf where their mean gradient is lost in noise, NaN where norms alone are known.
    """

    step: int
    name: str
    norms: tuple[float, ...]
    agreements: tuple[float, ...]
    orthogonality: float
    noise_scale: float


class RecordedStep(NamedTuple):
    """A recorded step, as callbacks get it.

    Attributes:
        step: How many steps were reduced before.
        rows: Of all layers together, then of each layer.
        alarms: What was found in this step, and not before.
    """

    step: int
    rows: list[Row]
    alarms: list[Alarm]


class _Block(NamedTuple):
    """A step's rows as an array, [1 + L, 2 n + 2], which takes a tenth of the tuples' memory."""

    step: int
    names: tuple[str, ...]
    values: Floats

    def rows(self) -> Iterator[Row]:
        n = self.values.shape[1] // 2 - 1
        for name, values in zip(self.names, self.values.tolist(), strict=True):
            yield Row(
                self.step, name, tuple(values[:n]), tuple(values[n : 2 * n]), *values[2 * n :]
            )


class Rows:
    """The last rows of a recorder; the last step's are kept whole, however many there are."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows, self._count = max_rows, 0
        self._blocks: deque[_Block] = deque()

    def __iter__(self) -> Iterator[Row]:
        for block in self._blocks:
            yield from block.rows()

    def add(self, grams: StepGrams, noise_scales: Floats) -> None:
        """Add a step, and drop the oldest ones that are too many."""
        others = np.stack([grams.orthogonality, noise_scales], axis=1)
        values = np.concatenate([grams.norms, grams.agreements, others], axis=1)
        self._blocks.append(_Block(grams.step, grams.names, values))
        self._count += len(values)
        while self._count > self._max_rows and len(self._blocks) > 1:
            self._count -= len(self._blocks.popleft().values)

    def last(self) -> list[Row]:
        """Return the last step's rows."""
        return list(self._blocks[-1].rows())

    def clear(self) -> None:
        """Drop all rows."""
        self._blocks.clear()
        self._count = 0

    def table(self) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the columns' names, and each row's values, one column a rank."""
        rows = list(self)
        n = max((len(row.norms) for row in rows), default=0)
        names = [f"{each}_{rank}" for each in ("norm", "agreement") for rank in range(n)]
        columns = ["step", "name", "orthogonality", "noise_scale", *names]
        # A recorder may have seen groups of several sizes.
        blank = (float("nan"),) * n
        values = [
            (*row[:2], *row[4:], *(row.norms + blank)[:n], *(row.agreements + blank)[:n])
            for row in rows
        ]
        return columns, values

    def to_csv(self, path: str | Path) -> None:
        """Write the table to a file."""
        columns, values = self.table()
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(values)

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas; to_csv() needs nothing"
            ) from error
        columns, values = self.table()
        return pandas.DataFrame(values, columns=columns)
