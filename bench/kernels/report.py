"""Tables, goals, plots and files of a run."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels.goals import GOALS
from bench.kernels.inputs import FRESH, WALL, size_label
from bench.kernels.judging import Goal, Verdict, judge
from bench.kernels.measure import COPY, DIRECT, OURS, READ, Row, geometric_mean
from bench.kernels.timing import Times

# The rows measured so far, a line each, until the report is written.
UNFINISHED = "rows.jsonl"
_COLUMNS = 3
# Rows of these series differ in more than size.
_NO_CURVES = (
    *("models", "segments", "segments on chip", "many small", "planned model"),
    *("planned segments", WALL, FRESH),
)
_ROOFS = {
    "cuda": "The roof is that large copy, of dot_and_norms and gram the sum. Times are the "
    "device's alone, but for rows by wall clock.",
    "cpu": "The roof is a copy of as much traffic as the row's, at most that large one.",
}
KERNELS = (
    *("pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"),
    *("gram", "weighted_sum"),
)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, legible as plain text; all columns but the first right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(header), line(rule), *map(line, lines)]


def kernel_lines(kernel: str, rows: Sequence[Row]) -> list[str]:
    """Return a kernel's table, the geometric mean of its ratios, and the notes on its peers."""
    mine = [row for row in rows if row.kernel == kernel]
    if not mine:
        return []
    on_gpu = any(row.hosts for row in mine)
    header = ["row", "size", "us", "spread", "GB/s", "of roof", "best peer", "peer / ours"]
    if on_gpu:
        header.insert(6, "host us")
        header.insert(8, "its host us")
    header.append("direct / plan")
    lines = []
    for row in mine:
        ours = row.times[OURS]
        best = row.best_peer
        cells = [
            row.label,
            size_label(row.size),
            f"{ours.median * 1e6:.1f}",
            f"{ours.low * 1e6:.1f}-{ours.high * 1e6:.1f}",
            f"{row.bandwidth / 1e9:.1f}",
            f"{row.fraction:.2f}",
            "none" if best is None else best + ("*" if best in row.notes else ""),
            "" if best is None else f"{row.ratio:.2f}",
            f"{row.over(DIRECT):.2f}" if DIRECT in row.times else "",
        ]
        if on_gpu:
            cells.insert(6, f"{row.hosts[OURS] * 1e6:.1f}")
            cells.insert(8, f"{row.hosts[best] * 1e6:.1f}" if best in row.hosts else "")
        lines.append(cells)
    mean = geometric_mean(row.ratio for row in mine if row.ratio is not None)
    notes = sorted({f"{name}: {note}" for row in mine for name, note in row.notes.items()})
    return [
        f"## {kernel}",
        "",
        *table(header, lines),
        "",
        f"Geometric mean of best peer / ours: {mean:.2f} over {len(mine)} rows.",
        *(f"\\* {note}" for note in notes),
        "",
    ]


def goal_lines(rows: Sequence[Row], device: str) -> list[str]:
    """Return the table of goals; those of the other device are not measured."""
    lines = [
        _goal_cells(goal, judge(goal, rows if of == device else []))
        for of, goals in GOALS.items()
        for goal in goals
    ]
    return [
        "## Goals",
        "",
        *table(["goal", "asked", "got", "rows", "missed", "verdict", "worst row"], lines),
        "",
    ]


def _goal_cells(goal: Goal, verdict: Verdict) -> list[str]:
    asked = "" if goal.threshold is None else f"{'<=' if goal.at_most else '>='} {goal.threshold:g}"
    got = "" if verdict.value is None else f"{verdict.value:.3g}"
    part = f"/{verdict.rows}" if verdict.measured < verdict.rows else ""
    rows = f"{verdict.measured}{part}"
    return [goal.name, asked, got, rows, f"{verdict.missed}", verdict.status, verdict.row]


def report(rows: Sequence[Row], meta: dict[str, Any]) -> list[str]:
    """Return all tables; `meta` must have `device` and `kind` ("cuda" or "cpu")."""
    if not rows:
        return ["No rows."]
    wide = sum(row.times[OURS].high > 1.2 * row.times[OURS].low for row in rows)
    lines = [
        f"# Kernels on {meta['device']}",
        "",
        *(f"- {key}: {value}" for key, value in meta.items()),
        *_roof_lines(rows),
        f"- rows whose quartiles are more than 20 % apart: {wide} of {len(rows)}",
        "",
        "Medians; spread is from the lower to the upper quartile. GB/s counts the least traffic "
        f"(`*_bytes`). {_ROOFS[meta['kind']]} Peer / ours above 1: ours is faster.",
        "",
    ]
    for kernel in KERNELS:
        lines += kernel_lines(kernel, rows)
    return lines + goal_lines(rows, meta["kind"])


def _roof_lines(rows: Sequence[Row]) -> list[str]:
    """Return what the roofs of these rows were: the largest copy and, of rows that read, a sum."""
    lines = []
    for name, units, done in ((COPY, 2, "read and written"), (READ, 1, "read")):
        roofs = sorted({(row.copy_traffic, row.roof) for row in rows if name in row.times})
        large = [roof for traffic, roof in roofs if traffic == roofs[-1][0]]
        if large:
            lines.append(
                f"- roof, a {name} of {size_label(roofs[-1][0] // units)} timed in each row: "
                f"{min(large) / 1e9:.1f} to {max(large) / 1e9:.1f} GB/s {done}"
            )
    return lines


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _json(row: Row) -> str:
    """Return a row in one line, with five digits of every figure."""
    exact = json.dumps(asdict(row))
    return json.dumps(json.loads(exact, parse_float=lambda text: float(f"{float(text):.5g}")))


def append(row: Row, folder: Path, first: bool) -> None:
    """Append a row to the file of rows measured so far; the first one begins the file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / UNFINISHED).open("w" if first else "a") as file:
        file.write(_json(row) + "\n")


def unfinished(folder: Path) -> list[Row]:
    """Return the rows that a run into the folder has left, which did not come to its end."""
    path = folder / UNFINISHED
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # Killed while it wrote, it has left a part of its last line.
    whole = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(whole))
    return [row_of(json.loads(line)) for line in whole]


def row_of(fields: dict[str, Any]) -> Row:
    """Return the row of which `results.json` has these fields."""
    times = {name: Times(**each) for name, each in fields["times"].items()}
    return Row(**{**fields, "times": times})


def write(rows: Sequence[Row], meta: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, tables.md and, with matplotlib, a plot for each kernel.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "results.json", folder / "tables.md"
    lines = ",\n".join(map(_json, rows))
    data.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    text.write_text("\n".join(report(rows, meta)) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return [data, text]
    plots = [_plot(kernel, rows, meta, folder) for kernel in KERNELS]
    return [data, text, *(path for path in plots if path is not None)]


def _plot(kernel: str, rows: Sequence[Row], meta: dict[str, Any], folder: Path) -> Path | None:
    """Plot bandwidth over size: ours, every peer and the roof, a panel for each series."""
    import matplotlib

    matplotlib.use("Agg")
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
    for position, (name, each) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, columns, position)
        each = sorted(each, key=lambda row: row.size)
        sizes = [row.size for row in each]
        axis.plot(sizes, [row.roof / 1e9 for row in each], "--", color="black", label="roof")
        for peer in dict.fromkeys(peer for row in each for peer in row.peers):
            timed = [row for row in each if peer in row.times]
            axis.plot(
                [row.size for row in timed],
                [row.traffic / row.times[peer].median / 1e9 for row in timed],
                ".-",
                linewidth=1,
                alpha=0.8,
                # A legend leaves out names that start with an underscore.
                label=peer.lstrip("_"),
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
