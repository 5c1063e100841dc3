"""A row of the all-reduce benchmark: its numbers, as text and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.timing import Times
from collectives.tools.bench import bandwidths


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    count, dtype: of a rank's buffer; ranks: how many; seconds: of a call, by iteration; wrong:
    elements, None where not checked.
    """

    count: int
    dtype: torch.dtype
    redop: str
    algorithm: str
    ranks: int
    seconds: list[float]
    wrong: int | None

    @property
    def size(self) -> int:
        """Bytes of a rank's buffer."""
        return self.count * self.dtype.itemsize

    @property
    def median(self) -> float:
        return Times.of(self.seconds).median

    def record(self) -> dict[str, Any]:
        """Return what JSON holds, in nccl-tests' units: microseconds and GB/s.

        algbw: the size over the time; busbw: what a rank sends in a ring, over the time.
        """
        times = Times.of(self.seconds)
        algbw, busbw = bandwidths(self.size, times.median, self.ranks)
        return {
            "size": self.size,
            "count": self.count,
            "type": str(self.dtype).removeprefix("torch."),
            "redop": self.redop,
            "algorithm": self.algorithm,
            "time": times.median * 1e6,
            "time_low": times.low * 1e6,
            "time_high": times.high * 1e6,
            "algbw": algbw,
            "busbw": busbw,
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
    its = row.record()
    spread = f"{its['time_low']:.1f}-{its['time_high']:.1f}"
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    ratio = "" if row is torchs else f"{torchs.median / row.median:.2f}"
    return (
        f"  {row.size:12d} {row.count:12d} {its['type']:>9} {row.redop:>7} {row.algorithm:>{width}}"
        f" {its['time']:10.1f} {spread:>17} {its['algbw']:7.2f}"
        f" {its['busbw']:7.2f} {wrong:>7} {ratio:>8}"
    )
