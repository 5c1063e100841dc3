"""The page of a run: its stages, what adasum.check said, predictions held against results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.plan import CHECK, RANKS
from bench.gpu.predictions import PREDICTIONS, Measured, Prediction
from bench.gpu.stages import Record
from bench.kernels import report
from bench.kernels.measure import Row


def rows_of(folder: Path) -> list[Row]:
    """Return all rows that stages have measured, a stage that was ended included."""
    found: dict[str, Row] = {}
    for path in sorted((folder / "stages").glob("*/*/partial/results.json")):
        rows = json.loads(path.read_text())["rows"]
        found |= {row.key: row for row in map(report.row_of, rows)}
    for path in sorted((folder / "stages").glob(f"*/*/{report.UNFINISHED}")):
        found |= {row.key: row for row in report.unfinished(path.parent)}
    return [*found.values()]


def ranks_of(folder: Path) -> dict[str, Any]:
    """Return what the stage of ranks on one GPU has written, by algorithm."""
    try:
        found = json.loads((folder / "stages" / RANKS / "ranks.json").read_text())
    except (OSError, ValueError):
        return {}
    return {each["algorithm"]: each for each in found["results"]}


def _title(meta: Mapping[str, Any]) -> list[str]:
    return [f"# {meta['device']}", "", *(f"- {key}: {value}" for key, value in meta.items()), ""]


def _stage_lines(records: Sequence[Record]) -> list[str]:
    lines = [
        [record.name, record.status, f"{record.seconds:.0f}", record.reason] for record in records
    ]
    return ["## Stages", "", *report.table(["stage", "status", "s", "why"], lines), ""]


def _check_lines(folder: Path) -> list[str]:
    try:
        said = (folder / "stages" / CHECK / "log.txt").read_text(errors="replace")
    except OSError:
        return []
    return ["## Check", "", "```", said.rstrip(), "```", ""]


def _failures(folder: Path) -> Iterator[str]:
    """Yield what became of the tests, a list for each report of pytest's."""
    for path in sorted((folder / "stages").glob("*/junit.xml")):
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError:
            continue
        wrong = [each for each in cases if any(part.tag in ("failure", "error") for part in each)]
        skipped = sum(any(part.tag == "skipped" for part in each) for each in cases)
        yield f"## {path.parent.name}"
        yield ""
        passed = len(cases) - len(wrong) - skipped
        yield f"{passed} passed, {len(wrong)} failed, {skipped} skipped."
        yield ""
        for each in wrong:
            message = next(
                part.get("message", "") for part in each if part.tag in ("failure", "error")
            )
            name = f"{each.get('classname')}::{each.get('name')}"
            yield f"- `{name}`: {' '.join(message.split())[:200]}"
        yield ""


def _cells(prediction: Prediction, measured: Measured) -> list[str]:
    found = prediction.look(measured)
    sign = "<=" if prediction.at_most else ">="
    bound = "" if prediction.bound is None else f"{sign} {prediction.bound:g}"
    figure = "" if found.figure is None else f"{found.figure:.3g}"
    return [prediction.text, bound, figure, found.status, found.where, prediction.measured_by]


def prediction_lines(measured: Measured) -> list[str]:
    """Return the table of predictions."""
    header = ["predicted", "bound", "found", "", "worst row", "measured by"]
    lines = [_cells(each, measured) for each in PREDICTIONS]
    return ["## Predictions", "", *report.table(header, lines), ""]


def _rank_lines(ranks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not ranks:
        return []
    lines = [
        [
            name,
            str(each["ranks"]),
            report.size_label(each["size"]),
            f"{each['median'] * 1e6:.0f}",
            f"{each['wrong']}",
        ]
        for name, each in ranks.items()
    ]
    header = ["algorithm", "ranks", "size", "us", "wrong"]
    return ["## Ranks on one GPU", "", *report.table(header, lines), ""]


def write(folder: Path, records: Sequence[Record], meta: Mapping[str, Any]) -> list[Path]:
    """Write page.md, page.json and, of what rows there are, results.json, tables.md and plots.

    Args:
        folder: Where the stages have written.
        records: How they ended.
        meta: Of the machine; `device`, `torch` and `date` at least.

    Returns:
        The files written.
    """
    rows, ranks = rows_of(folder), ranks_of(folder)
    measured = Measured(rows, ranks)
    page = folder / "page.md"
    page.write_text(
        "\n".join(
            [
                *_title(meta),
                *_stage_lines(records),
                *prediction_lines(measured),
                *_check_lines(folder),
                *_failures(folder),
                *_rank_lines(ranks),
            ]
        )
        + "\n"
    )
    data = folder / "page.json"
    found = {each.text: each.look(measured)._asdict() for each in PREDICTIONS}
    stages = [record.__dict__ for record in records]
    data.write_text(
        json.dumps({"meta": dict(meta), "stages": stages, "predictions": found}, indent=1) + "\n"
    )
    if not rows:
        return [page, data]
    return [page, data, *report.write(rows, {**meta, "kind": "cuda"}, folder)]
