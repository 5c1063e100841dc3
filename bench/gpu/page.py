"""The page of a run: its stages, what adasum.check said, predictions held against results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.plan import CHECK, HOST, NODE, RANKS
from bench.gpu.predictions import Found, look
from bench.gpu.stages import Record
from bench.kernels import report
from bench.kernels.measure import OURS, Row
from bench.tables import table


def rows_of(folder: Path) -> list[Row]:
    """Return all rows that stages have measured, a stage that was ended included."""
    found: dict[str, Row] = {}
    for path in sorted((folder / "stages").glob("*/*/partial/results.json")):
        rows = json.loads(path.read_text())["rows"]
        found |= {row.key: row for row in map(report.row_of, rows)}
    for path in sorted((folder / "stages").glob(f"*/*/{report.UNFINISHED}")):
        found |= {row.key: row for row in report.unfinished(path.parent)}
    return [*found.values()]


def _ranks_of(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Return the rows that a stage of ranks on one GPU has written."""
    try:
        found = json.loads((folder / "stages" / stage / "ranks.json").read_text())
    except (OSError, ValueError):
        return []
    return [*found["results"]]


def _lines_of_ranks(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lines = [
        [
            *(row["algorithm"], str(row["ranks"]), report.size_label(row["size"])),
            *(f"{row['median'] * 1e6:.0f}", str(row["wrong"])),
        ]
        for row in rows
    ]
    header = ["algorithm", "ranks", "size", "us", "wrong"]
    yield from (f"## {title}", "", *table(header, lines), "")


def _beside(rows: Sequence[Row], published: Sequence[Row]) -> Iterator[str]:
    """Yield the medians of rows beside those that bench/results has of such a device."""
    before = {row.key: row.times[OURS].median for row in published}
    lines = [
        [
            row.key,
            *(f"{us * 1e6:.1f}" for us in (before[row.key], now)),
            f"{now / before[row.key]:.2f}",
        ]
        for row in rows
        if row.key in before and (now := row.times[OURS].median)
    ]
    if lines:
        header = ["row", "published us", "us", "ratio"]
        yield from ("## Beside the published rows", "", *table(header, lines), "")


def _tests_of(folder: Path) -> Iterator[str]:
    """Yield what became of the tests, a list for each report of pytest's."""
    for path in sorted((folder / "stages").glob("*/junit.xml")):
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError:
            continue
        wrong = {
            f"{case.get('classname')}::{case.get('name')}": part.get("message", "")
            for case in cases
            for part in case
            if part.tag in ("failure", "error")
        }
        skipped = sum(case.find("skipped") is not None for case in cases)
        passed = len(cases) - len(wrong) - skipped
        counts = f"{passed} passed, {len(wrong)} failed, {skipped} skipped."
        yield from (f"## {path.parent.name}", "", counts, "")
        for name, message in wrong.items():
            yield f"- `{name}`: {' '.join(message.split())[:200]}"
        yield ""


def _cells(found: Found) -> list[str]:
    figure = "" if found.figure is None else f"{found.figure:.3g}"
    return [found.text, found.bound, figure, found.status, found.where, found.measured_by]


def _page(
    folder: Path,
    records: Sequence[Record],
    meta: Mapping[str, Any],
    predictions: Sequence[Found],
    rows: Sequence[Row],
) -> Iterator[str]:
    yield from (f"# {meta['device']}", "", *(f"- {key}: {value}" for key, value in meta.items()))
    stages = [[each.name, each.status, f"{each.seconds:.0f}", each.reason] for each in records]
    yield from ("", "## Stages", "", *table(["stage", "status", "s", "why"], stages))
    header = ["predicted", "bound", "found", "", "worst row", "measured by"]
    yield from ("", "## Predictions", "", *table(header, [*map(_cells, predictions)]), "")
    said = folder / "stages" / CHECK / "log.txt"
    if said.exists():
        text = said.read_text(errors="replace").rstrip()
        yield from ("## Check", "", "```", text, "```", "")
    yield from _tests_of(folder)
    for title, stage in (("A node's kernels", NODE), ("Ranks on one GPU", RANKS)):
        if ranks := _ranks_of(folder, stage):
            yield from _lines_of_ranks(title, ranks)
    host = folder / "stages" / HOST / "log.txt"
    if host.exists():
        yield from (
            "## The host's time, microseconds",
            "",
            "```",
            host.read_text().rstrip(),
            "```",
            "",
        )
    yield from _beside(rows, report.published(meta["device"]))


def write(folder: Path, records: Sequence[Record], meta: Mapping[str, Any]) -> list[Path]:
    """Write page.md, page.json and, of what rows there are, results.json, tables.md and plots.

    meta: of the machine; `device`, `torch` and `date` at least. Returns the files written.
    """
    rows = rows_of(folder)
    predictions = look(rows, {each["algorithm"]: each for each in _ranks_of(folder, RANKS)})
    page, data = folder / "page.md", folder / "page.json"
    page.write_text("\n".join(_page(folder, records, meta, predictions, rows)) + "\n")
    stages = [asdict(record) for record in records]
    found = {each.text: each._asdict() for each in predictions}
    whole = {"meta": dict(meta), "stages": stages, "predictions": found}
    data.write_text(json.dumps(whole, indent=1) + "\n")
    return [page, data, *(report.write(rows, {**meta, "kind": "cuda"}, folder) if rows else [])]
