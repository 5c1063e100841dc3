"""Run what is missing of the protocol's trainings, then write every table and plot.

make evidence                                     # all of it; again to go on after an interruption
make evidence EVIDENCE_ARGS="--minutes 100"       # a piece of it
make evidence EVIDENCE_ARGS="--bill"              # what it costs, from a few steps timed now
make evidence EVIDENCE_ARGS="--check digits/average_n8_r0.0625_w0.1_s0_test"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from evidence import bill, plots, report, store
from evidence.cells import train
from evidence.protocol import count, stages
from evidence.runner import SECONDS, Runner, Stop
from evidence.tasks import TASKS


def check(name: str, results: store.Store) -> int:
    """Run a stored cell again and print what differs; return the exit status."""
    old = results.named(name)
    if old is None:
        print(f"there is no result {name} in {results.path_of('*')}", file=sys.stderr)
        return 2
    new = train(store.cell_of(old))
    different = store.differences(old, new)
    for line in different:
        print(line)
    here, there = store.made_by(new["cell"]["task"]), old["made_by"]
    for key in here:
        if here[key] != there.get(key):
            print(f"({key} was {there.get(key)}, is {here[key]})")
    validation, test = new["validation"], new["test"]
    print(f"{name}: validation {validation}, test {test}: {'differs' if different else 'the same'}")
    return 1 if different else 0


def write_reports(names: Sequence[str], found: store.Store, folder: Path) -> None:
    for name in names:
        results = report.Results(name, found)
        (folder / f"{name}.md").write_text(report.page(results))
        print(folder / f"{name}.md", *plots.write(results, folder), sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after")
    parser.add_argument("--folder", type=Path, default=store.FOLDER, help="of the results")
    parser.add_argument("--bill", action="store_true", help="time a few steps, run nothing")
    parser.add_argument("--report", action="store_true", help="write tables and plots, run nothing")
    parser.add_argument("--check", metavar="CELL", help="run a cell again and compare")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = store.Store(options.folder)
    if options.check:
        return check(options.check, results)
    if options.bill:
        text, hours = bill.table(options.tasks)
        print(text)
        if hours <= bill.MOST_HOURS:
            return 0
        print(f"evidence: a run stops after {bill.MOST_HOURS:g} core-hours", file=sys.stderr)
        return 1
    if not options.report:
        run(options, results)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_reports(options.tasks, results, options.folder)
    return 0


def run(options: argparse.Namespace, results: store.Store) -> None:
    total = sum(
        SECONDS[name] * len({cell.name for cell in cells})
        for name in options.tasks
        for cells in count(name).values()
    )
    try:
        with Runner(results, options.workers, options.minutes, total) as runner:
            for name in options.tasks:
                for stage, cells in stages(name, report.Results(name, results)):
                    runner.run(f"{name}: {stage}", cells)
    except Stop as stop:
        print(f"evidence: {stop}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
