"""The report's arithmetic, goals and files, on made-up rows."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest

from bench.kernels import goals, judging, report
from bench.kernels.measure import (
    COPY,
    DIRECT,
    EMPTY,
    OURS,
    TWO,
    TWO_APART,
    Row,
    geometric_mean,
)
from bench.kernels.timing import Times

META = {"device": "Made-Up GPU 80GB", "kind": "cuda", "torch": "0", "date": "never"}


def row_of(kernel="pack", label="aligned 64 MiB", series="aligned", size=64 << 20, **times) -> Row:
    """Return a row: ours takes 128 us for 256 MB, a copy of 2 GB 0.8 ms: 2.0 of 2.5 TB/s."""
    seconds = {OURS: 128e-6, COPY: 800e-6, EMPTY: 4e-6, "slow": 512e-6, "fast": 192e-6} | times
    return Row(
        kernel=kernel,
        series=series,
        label=label,
        size=size,
        traffic=256_000_000,
        elements=1 << 24,
        tensors=1,
        times={name: Times(s, 0.9 * s, 1.1 * s, 9) for name, s in seconds.items()},
        peers=["slow", "fast"],
        copy_traffic=2_000_000_000,
        hosts={OURS: 12e-6, "fast": 30e-6},
    )


def test_row_gives_bandwidth_fraction_of_roof_and_ratio():
    row = row_of()
    assert row.bandwidth == pytest.approx(2e12)
    assert row.roof == pytest.approx(2.5e12)
    assert row.fraction == pytest.approx(0.8)
    assert row.best_peer == "fast"
    assert row.ratio == pytest.approx(1.5)
    assert row.over("nobody") is None


def test_geometric_mean_of_values_and_of_none():
    assert geometric_mean([0.5, 8.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_times_of_samples_are_median_and_quartiles():
    assert Times.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Times(3.0, 2.0, 4.0, 5)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0, 1)


def goal_of(threshold, at_most=False, mean=False, figure=lambda row: row.ratio) -> judging.Goal:
    return judging.Goal(
        "made up", "cuda", lambda row: row.kernel == "pack", figure, threshold, at_most, mean
    )


def test_goal_judged_on_rows_is_met_or_not_by_its_figures():
    # Ratios of 1.5 and 6.
    rows = [row_of(), row_of(label="other", ours=32e-6), row_of(kernel="unpack", ours=1.0)]
    met = judging.judge(goal_of(1.5), rows)
    assert (met.status, met.row, met.rows, met.missed) == (judging.MET, "pack aligned 64 MiB", 2, 0)
    missed = judging.judge(goal_of(1.6), rows)
    assert (missed.status, missed.missed, missed.value) == (judging.NOT_MET, 1, pytest.approx(1.5))
    assert judging.judge(goal_of(2.9, mean=True), rows).status == judging.MET
    assert judging.judge(goal_of(3.1, mean=True), rows).value == pytest.approx(3.0)
    assert judging.judge(goal_of(6.0, at_most=True), rows).status == judging.MET
    assert judging.judge(goal_of(5.9, at_most=True), rows).row == "pack other"
    assert judging.judge(goal_of(None), rows).status == judging.STATED
    assert judging.judge(goal_of(1.0), rows[2:]).status == judging.NOT_MEASURED


def test_goal_with_a_row_without_figure_is_met_in_part():
    rows = [row_of(), row_of(label="silent")]
    goal = goal_of(1.0, figure=lambda row: None if row.label == "silent" else row.ratio)
    verdict = judging.judge(goal, rows)
    assert (verdict.status, verdict.measured, verdict.rows) == (judging.PARTLY, 1, 2)


def verdict_of(name: str, rows: list[Row]) -> judging.Verdict:
    return judging.judge(next(goal for goal in goals.GOALS if goal.name == name), rows)


def test_goals_of_adasum_count_three_and_five_units():
    # 256 MB at 2.5 TB/s are 102.4 us; ours takes 124 us and an empty launch of 4 us.
    on_chip = row_of("adasum", "fp32 8 MiB", "fp32")
    name = "adasum on chip: (time - empty launch) over the three-unit roof"
    verdict = verdict_of(name, [on_chip])
    assert verdict.status == judging.NOT_MEASURED
    small = Row(**{**vars(on_chip), "elements": goals.ON_CHIP})
    assert verdict_of(name, [small]).value == pytest.approx(124 / 102.4)
    # Five units take 102.4 * 5/3 us at the roof; ours take 128.
    beyond = verdict_of("adasum beyond: fraction of the five-unit roof", [on_chip])
    assert beyond.value == pytest.approx(4 / 3)


def test_goal_of_two_launches_is_the_mean_gain_of_overlap_where_both_were_timed():
    name = "adasum of up to 1 MiB in two launches: without overlap over with it"
    beside = {DIRECT: 1e-4, TWO: 8e-6, TWO_APART: 10e-6}
    rows = [row_of("adasum", "planned 64 KiB", "planned", **beside)]
    assert verdict_of(name, rows).value == pytest.approx(1.25)
    del beside[TWO_APART]
    rows.append(row_of("adasum", "planned 1 MiB", "planned", **beside))
    assert (verdict_of(name, rows).status, verdict_of(name, rows).measured) == (judging.PARTLY, 1)


def test_goals_of_large_rows_leave_out_smaller_and_misaligned_ones():
    name = "pack, unpack of 64 MB or more: fraction of the roof"
    small = row_of(size=63_000_000)
    misaligned = row_of(series="misaligned")
    assert verdict_of(name, [small, misaligned]).status == judging.NOT_MEASURED
    assert verdict_of(name, [small, misaligned, row_of()]).value == pytest.approx(0.8)


def test_chain_of_adds_with_a_second_pass_counts_as_chain():
    name = "sum_n of 8: chain of adds over ours"
    rows = [
        dataclasses.replace(row_of("sum_n", **{peer: 384e-6}), tensors=8, peers=[peer, "fast"])
        for peer in ("chain of adds", "chain of adds + mul_")
    ]
    verdict = verdict_of(name, rows)
    assert (verdict.status, verdict.value, verdict.measured) == (judging.MET, pytest.approx(3.0), 2)


def test_goals_of_the_other_device_are_reported_as_not_measured():
    text = "\n".join(report.goal_lines([row_of()], "cpu"))
    asked = [
        line for line in text.splitlines() if "pack, unpack: best peer over ours, each" in line
    ]
    assert len(asked) == 1 and judging.NOT_MEASURED in asked[0]
    assert "NOT MET" not in text


def test_write_of_a_run_makes_results_tables_and_plots(tmp_path):
    sizes = [1 << 16, 1 << 20, 1 << 24]
    rows = [row_of(label=f"aligned {size}", size=size) for size in sizes]
    pytest.importorskip("matplotlib")
    written = report.write(rows, META, tmp_path / "made-up")
    assert [path.name for path in written] == ["results.json", "tables.md", "pack.png"]
    assert all(path.stat().st_size > 0 for path in written)
    data = json.loads(written[0].read_text())
    assert data["meta"] == META
    back = Row(**{**data["rows"][0], "times": {}})
    assert (back.label, back.traffic) == ("aligned 65536", 256_000_000)
    assert data["rows"][0]["times"]["ours"]["median"] == 128e-6
    lines = written[1].read_text().splitlines()
    row = next(line for line in lines if line.startswith("| aligned 1048576 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "aligned 1048576",
        "1 MiB",
        "128.0",
        "115.2-140.8",
        "2000.0",
        "0.80",
        "12.0",
        "fast",
        "30.0",
        "1.50",
        "",
    ]
    assert "Geometric mean of best peer / ours: 1.50 over 3 rows." in lines


def test_write_without_matplotlib_makes_no_plots(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sizes = [1 << 16, 1 << 20, 1 << 24]
    rows = [row_of(label=f"aligned {size}", size=size) for size in sizes]
    written = report.write(rows, META, tmp_path)
    assert [path.name for path in written] == ["results.json", "tables.md"]


def test_slug_of_a_device_is_a_folder_name():
    assert report.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
