"""The bench's options, the fixture `record` that measures a case, and the report at the end.

    --bench-results DIR   write results.json, tables.md and plots to DIR/<device>
    --bench-rows TEXT     only rows with TEXT in their name: "sum_n n=5 16 MiB" is one row
    --bench-part PART     "goals": only rows that goals single out; "others": only the rest
    --bench-gpu           end with status 2 where torch sees no GPU
    --bench-resume        keep the rows that a run into the same folder has left, and go on

Without --bench-results the tables are printed and nothing is written. A run that did not measure
every row, because of a selection or a wrong answer, is written to DIR/<device>/partial, so that it
never replaces a full one. While a run lasts, DIR/<device>/rows.jsonl has a line for each row
measured; a run that is killed leaves it behind, and one that is to be resumed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import (
    bench_gram,
    bench_packing,
    bench_projection,
    bench_reduction,
    goals,
    report,
)
from bench.kernels.case import Case
from bench.kernels.measure import Row, measure
from bench.kernels.timing import DEVICE
from bench.provenance import commit, version

ROWS = pytest.StashKey[list[Row]]()
BEGAN = pytest.StashKey[tuple[float, float]]()
_SPECS = [
    *bench_packing.SPECS,
    *bench_reduction.SPECS,
    *bench_projection.SPECS,
    *bench_gram.SPECS,
]
# Each row's position in the report, by its name.
POSITIONS = {str(spec): position for position, spec in enumerate(_SPECS)}
_played = {"now": 0.0}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench")
    group.addoption("--bench-results", type=Path, metavar="DIR", help="write the report there")
    group.addoption("--bench-rows", default="", metavar="TEXT", help="only rows named like it")
    group.addoption("--bench-part", choices=["goals", "others"], help="rows of goals, or the rest")
    group.addoption("--bench-gpu", action="store_true", help="end where torch sees no GPU")
    group.addoption("--bench-resume", action="store_true", help="go on after an interrupted run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("bench_gpu") and DEVICE != "cuda":
        pytest.exit("torch sees no GPU here", returncode=2)
    config.stash[ROWS] = []
    config.stash[BEGAN] = time.time(), os.getloadavg()[0]
    if config.getoption("benchmark_compare"):
        # `make bench` keeps the plugin quiet, since our tables have its numbers; they do not have
        # its comparison with an earlier run.
        config.option.benchmark_quiet = False


def read_played() -> float:
    """Return the time for the `benchmark` fixture, which advances by what `measure` measured."""
    return _played["now"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.benchmark(timer=read_played))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named, part = config.getoption("bench_rows"), config.getoption("bench_part")
    first = {str(s) for s in _SPECS if goals.singled_out(s.kernel, s.series, s.size)}
    done = set()
    if config.getoption("bench_resume") and (folder := _folder(config)) is not None:
        config.stash[ROWS] += report.unfinished(folder)
        done = {row.key for row in config.stash[ROWS]}

    def chosen(item: pytest.Item) -> bool:
        row = _row_name(item)
        asked = part is None or (row in first) == (part == "goals")
        return asked and named in row and row not in done

    left = [item for item in items if not chosen(item)]
    config.hook.pytest_deselected(items=left)
    published = {row.key for row in report.published(_device())} if DEVICE == "cuda" else ()
    items[:] = [item for item in items if item not in left]
    # What no published table has comes first, where time may not be enough for all.
    items.sort(key=lambda item: _row_name(item) in published)


def _row_name(item: pytest.Item) -> str:
    """Return the name of its row, as in the tables."""
    return item.name.partition("[")[2].removesuffix("]")


def pytest_collection_finish() -> None:
    if DEVICE == "cuda":
        # Asked now and cached: after an invalid access the driver may refuse even this.
        _device()
        # Each row and each capture of a graph collects garbage, which skips what is frozen here.
        gc.collect()
        gc.freeze()


@pytest.fixture
def record(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Callable[[Case], None]]:
    """Measure a case, keep its row, and report its samples to the `benchmark` fixture.

    Fails on a wrong answer. With --benchmark-disable only the answer is checked.
    """

    def run(case: Case) -> None:
        if benchmark.disabled:
            benchmark(case.ours.check, case.expected)
            return
        row, samples = measure(case)
        left = iter(samples)

        def play() -> None:
            _played["now"] += next(left)

        _played["now"] = 0.0
        benchmark.pedantic(play, rounds=len(samples))
        benchmark.extra_info.update(
            bytes=row.traffic,
            gigabytes_per_second=row.bandwidth / 1e9,
            fraction_of_copy_roof=row.fraction,
            best_peer=row.best_peer,
            best_peer_over_ours=row.ratio,
            peer_seconds={name: row.times[name].median for name in row.peers},
            notes=row.notes,
        )
        rows = request.config.stash[ROWS]
        rows.append(row)
        if (folder := _folder(request.config)) is not None:
            report.append(row, folder, first=len(rows) == 1)

    yield run
    if DEVICE == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[ROWS]:
        # All rows were there already.
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = sorted(config.stash[ROWS], key=lambda row: POSITIONS[row.key])
    if not rows:
        return
    meta = _meta(rows, *config.stash[BEGAN])
    terminalreporter.section("kernels beside their peers")
    for line in report.report(rows, meta):
        terminalreporter.write_line(line)
    folder = _folder(config)
    if folder is not None:
        complete = {row.key for row in rows} == POSITIONS.keys()
        for path in report.write(rows, meta, folder if complete else folder / "partial"):
            terminalreporter.write_line(f"wrote {path}")
        if not config.getoption("bench_resume"):
            (folder / report.UNFINISHED).unlink()


def _folder(config: pytest.Config) -> Path | None:
    results: Path | None = config.getoption("bench_results")
    if results is None:
        return None
    return results / (report.slug(_device()) if DEVICE == "cuda" else "cpu")


@functools.cache
def _device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else _processor()


def _meta(rows: list[Row], began: float, load: float) -> dict[str, Any]:
    on_gpu = DEVICE == "cuda"
    return {
        "device": _device(),
        "kind": DEVICE,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda if on_gpu else "none",
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "load": f"{load:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "rows": f"{len(rows)} of {len(POSITIONS)} in {time.time() - began:.0f} s",
    }


def _processor() -> str:
    # Where there is no such file, or no such line, its architecture must do.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
