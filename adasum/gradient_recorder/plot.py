"""A recorder's rows as a picture of matplotlib's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adasum.gradient_recorder.alarms import Alarm
from adasum.gradient_recorder.rows import Row

# Okabe and Ito's colours, which colour-blind readers tell apart; dashes differ, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
# As wide as a phone shows without making the letters smaller than they can be read.
_WIDTH = 5.6


def plot(name: str, rows: Sequence[Row], alarms: Sequence[Alarm]) -> Any:
    """Draw one layer's rows: each rank's norm and agreement, and the noise scale."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install matplotlib") from error
    # Not by pyplot, which would keep the figure until it is closed.
    figure = Figure(figsize=(_WIDTH, 6.0), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    steps = [row.step for row in rows]
    for rank in range(max(len(row.norms) for row in rows)):
        style: dict[str, Any] = {"color": _COLOURS[rank % len(_COLOURS)], "linewidth": 1.0}
        style |= {"linestyle": _DASHES[rank % len(_DASHES)], "label": f"rank {rank}"}
        # A recorder may have seen groups of several sizes.
        there = [row for row in rows if rank < len(row.norms)]
        at = [row.step for row in there]
        panels[0].plot(at, [row.norms[rank] for row in there], **style)
        panels[1].plot(at, [row.agreements[rank] for row in there], **style)
    panels[2].plot(steps, [row.noise_scale for row in rows], color=_COLOURS[0], linewidth=1.0)
    panels[0].set(title=name, ylabel="norm", yscale="log")
    panels[1].set(ylabel="agreement")
    panels[2].set(ylabel="noise scale,\nbatches of a rank", yscale="log", xlabel="step")
    for alarm in alarms:
        for panel in panels:
            panel.axvline(alarm.step, color="#000000", linewidth=0.8, linestyle=(0, (1, 3)))
        ranks = " and ".join(map(str, alarm.ranks))
        panels[0].annotate(
            f" {alarm.kind}: {ranks}",
            (alarm.step, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize="small",
            rotation=90,
            va="top",
        )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
