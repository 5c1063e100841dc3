"""A row of the all-reduce benchmark: its numbers, as text and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.kernels.timing import Times


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    size: bytes of a rank's buffer; count: its elements; type, redop, algorithm: their names; ranks:
    how many; seconds: of a call, by iteration; wrong: elements, None where not checked.
    """

    size: int
    count: int
    type: str
    redop: str
    algorithm: str
    ranks: int
    seconds: list[float]
    wrong: int | None

    @property
    def times(self) -> Times:
        """Quartiles of the seconds."""
        return Times.of(self.seconds)

    @property
    def median(self) -> float:
        return self.times.median

    def record(self) -> dict[str, Any]:
        """Return what JSON holds, in nccl-tests' units: microseconds and GB/s.

        algbw: the size over the time; busbw: what a rank sends in a ring, over the time.
        """
        times, algbw = self.times, self.size / self.median / 1e9
        return {
            **{name: getattr(self, name) for name in ("size", "count", "type", "redop")},
            "algorithm": self.algorithm,
            "time": times.median * 1e6,
            "time_low": times.low * 1e6,
            "time_high": times.high * 1e6,
            "algbw": algbw,
            "busbw": algbw * 2 * (self.ranks - 1) / self.ranks,
            "wrong": self.wrong,
        }


def header(width: int) -> list[str]:
    """Return nccl-tests' heading, with columns for the algorithm, the quartiles and the peer.

    width: characters of the algorithm's column.
    """
    left = f"{'size':>12} {'count':>12} {'type':>9} {'redop':>7} {'algorithm':>{width}}"
    right = (
        f"{'time':>10} {'quartiles':>17} {'algbw':>7} {'busbw':>7} {'#wrong':>7} {'vs torch':>8}"
    )
    units = f"{'(us)':>10} {'(us)':>17} {'(GB/s)':>7} {'(GB/s)':>7}"
    return [f"# {left} {right}", f"# {'(B)':>12} {'(elements)':>12} {'':>{18 + width}} {units}"]


def line(row: Row, torchs: Row, width: int) -> str:
    """Return the row under `header`; vs torch is torch's time over this one's."""
    figures = row.record()
    spread = f"{figures['time_low']:.1f}-{figures['time_high']:.1f}"
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    ratio = "" if row is torchs else f"{torchs.median / row.median:.2f}"
    return (
        f"  {row.size:12d} {row.count:12d} {row.type:>9} {row.redop:>7} {row.algorithm:>{width}}"
        f" {figures['time']:10.1f} {spread:>17} {figures['algbw']:7.2f}"
        f" {figures['busbw']:7.2f} {wrong:>7} {ratio:>8}"
    )
