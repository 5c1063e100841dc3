"""Bandwidth over size: ours, every peer, and the roof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench.kernels.row import OURS, Row

matplotlib.use("Agg")
_COLUMNS = 3
# Their rows differ in more than size.
_NO_CURVES = ("models", "segments", "many small")


def plot(kernel: str, rows: Sequence[Row], meta: dict[str, Any], folder: Path) -> Path | None:
    """One panel for each series of three sizes or more; None where there is none."""
    from matplotlib import pyplot

    series: dict[str, list[Row]] = {}
    for row in rows:
        if row.kernel == kernel and row.series not in _NO_CURVES:
            series.setdefault(row.series, []).append(row)
    panels = {name: each for name, each in series.items() if len({row.size for row in each}) >= 3}
    if not panels:
        return None
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = pyplot.figure(figsize=(6.5 * columns, 4.5 * lines), layout="constrained")
    for place, (name, each) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, columns, place)
        each = sorted(each, key=lambda row: row.size)
        sizes = [row.size for row in each]
        axis.plot(sizes, [row.roof / 1e9 for row in each], "--", color="black", label="copy (roof)")
        for rival in dict.fromkeys(rival for row in each for rival in row.rivals):
            timed = [row for row in each if rival in row.times]
            axis.plot(
                [row.size for row in timed],
                [row.traffic / row.times[rival].median / 1e9 for row in timed],
                ".-",
                linewidth=1,
                alpha=0.8,
                # A legend leaves out names that start with an underscore.
                label=rival.lstrip("_"),
            )
        ours = [row.traffic / row.times[OURS].median / 1e9 for row in each]
        axis.plot(sizes, ours, "o-", color="crimson", linewidth=2, label="ours")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("bytes")
        axis.set_ylabel("GB/s of the least traffic")
        axis.set_title(f"{kernel}: {name}")
        axis.legend(fontsize=7)
    figure.suptitle(f"{meta['device']}, torch {meta['torch']}, {meta['date']}", fontsize=9)
    path = folder / f"{kernel}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
