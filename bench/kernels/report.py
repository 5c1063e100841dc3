"""Tables, goals, plots and files of a run."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels.case import DIRECT
from bench.kernels.goals import GOALS
from bench.kernels.inputs import FRESH, WALL, size_label
from bench.kernels.judging import judge
from bench.kernels.measure import COPY, OURS, READ, Row, geometric_mean
from bench.kernels.timing import Times
from bench.tables import table

RESULTS = Path(__file__).parents[1] / "results"
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


def kernel_lines(kernel: str, rows: Sequence[Row]) -> list[str]:
    """Return a kernel's table, the geometric mean of its ratios, and the notes on its peers."""
    mine = [row for row in rows if row.kernel == kernel]
    if not mine:
        return []
    lines = [_cells(row) for row in mine]
    if not any(row.hosts for row in mine):
        lines = [{name: each[name] for name in each if "host" not in name} for each in lines]
    mean = geometric_mean(row.ratio for row in mine if row.ratio is not None)
    notes = sorted({f"{name}: {note}" for row in mine for name, note in row.notes.items()})
    return [
        f"## {kernel}",
        "",
        *table([*lines[0]], [[*each.values()] for each in lines]),
        "",
        f"Geometric mean of best peer / ours: {mean:.2f} over {len(mine)} rows.",
        *(f"\\* {note}" for note in notes),
        "",
    ]


def _cells(row: Row) -> dict[str, str]:
    """Return a row's cells by the names of their columns."""
    ours, best, hosts = row.times[OURS], row.best_peer, row.hosts
    return {
        "row": row.label,
        "size": size_label(row.size),
        "us": f"{ours.median * 1e6:.1f}",
        "spread": f"{ours.low * 1e6:.1f}-{ours.high * 1e6:.1f}",
        "GB/s": f"{row.bandwidth / 1e9:.1f}",
        "of roof": f"{row.fraction:.2f}",
        "host us": f"{hosts[OURS] * 1e6:.1f}" if OURS in hosts else "",
        "best peer": "none" if best is None else best + ("*" if best in row.notes else ""),
        "its host us": f"{hosts[best] * 1e6:.1f}" if best in hosts else "",
        "peer / ours": "" if best is None else f"{row.ratio:.2f}",
        "direct / plan": f"{row.over(DIRECT):.2f}" if DIRECT in row.times else "",
    }


def goal_lines(rows: Sequence[Row], device: str) -> list[str]:
    """Return the table of the goals that rows were chosen for, and how many others there are."""
    lines, others = [], 0
    for of, goals in GOALS.items():
        for goal in goals:
            found = judge(goal, rows if of == device else [])
            if not found.rows:
                others += 1
                continue
            got = "" if found.value is None else f"{found.value:.3g}"
            count = f"{found.measured}/{found.rows}"
            if found.measured == found.rows:
                count = f"{found.rows}"
            cells = [goal.name, goal.limit, got, count, f"{found.missed}", found.status, found.row]
            lines.append(cells)
    header = ["goal", "asked", "got", "rows", "missed", "verdict", "worst row"]
    text = ["## Goals", "", *(table(header, lines) if lines else ["No goal asks for these rows."])]
    return [*text, "", f"{others} other goals were not measured.", ""] if others else [*text, ""]


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


def published(device: str) -> list[Row]:
    """Return the rows of bench/results that were measured on such a device."""
    path = RESULTS / slug(device) / "results.json"
    return [*map(row_of, json.loads(path.read_text())["rows"])] if path.exists() else []


def row_of(fields: dict[str, Any]) -> Row:
    """Return the row of which `results.json` has these fields."""
    times = {name: Times(**each) for name, each in fields["times"].items()}
    return Row(**{**fields, "times": times})


def write(rows: Sequence[Row], meta: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, tables.md and, with matplotlib, plots; return the files."""
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
