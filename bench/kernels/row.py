"""One measured row and its arithmetic. Plain data: JSON holds the same fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.kernels.timing import Times

OURS, COPY, EMPTY = "ours", "copy", "empty launch"
# Timed beside some rows of the projection, and no rivals.
ONE_SEGMENT, ONE_DOT = "one segment", "one torch.dot"


@dataclass(frozen=True)
class Row:
    """times: seconds by name: ours, every rival, the copy and whatever else was timed beside.

    kernel, series, label, size, traffic, elements, tensors: as in `case.Case`. rivals: the names
    that count as peers. copy_traffic: bytes that the copy moves. hosts: seconds of the host for a
    call (CUDA). replayed: names whose replay from a graph was the faster of the two ways.
    captured: whether ours replayed from a graph with the right answer; None where not tried.
    notes: by rival, why its answer is worth less or why it was left out.
    """

    kernel: str
    series: str
    label: str
    size: int
    traffic: int
    elements: int
    tensors: int
    times: dict[str, Times]
    rivals: list[str]
    copy_traffic: int
    hosts: dict[str, float] = field(default_factory=dict)
    replayed: list[str] = field(default_factory=list)
    captured: bool | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.label}"

    @property
    def seconds(self) -> float:
        return self.times[OURS].median

    @property
    def roof(self) -> float:
        """Bytes a second of the copy timed in this row."""
        return self.copy_traffic / self.times[COPY].median

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the least traffic, `*_bytes`."""
        return self.traffic / self.seconds

    @property
    def fraction(self) -> float:
        return self.bandwidth / self.roof

    @property
    def best_rival(self) -> str | None:
        return min(self.rivals, key=lambda name: self.times[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the best rival over ours: above 1, ours is the faster."""
        return None if self.best_rival is None else self.over(self.best_rival)

    def over(self, name: str) -> float | None:
        """Time of `name` over ours, None where it was not timed in this row."""
        return self.times[name].median / self.seconds if name in self.times else None


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
