"""`python -m bench.gpu`: run the stages that are not done, and write the page of all."""

from __future__ import annotations

import argparse
import datetime
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.gpu import page
from bench.gpu.cut_nccl import unpacked
from bench.gpu.machine import facts, source_of
from bench.gpu.plan import stages
from bench.gpu.stages import FAILED, NO_GPU, NO_TIME, OVERRUN, Runner
from bench.kernels.report import slug
from bench.processes import ROOT
from bench.provenance import commit


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return 0, 1 where a stage failed, 2 without a GPU, 3 where a stage is still to do."""
    began = time.monotonic()
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.nccl and not options.nccl.is_file():
        parser.error(f"--nccl: there is no file {options.nccl}")
    nccl = str(unpacked(options.nccl.resolve())) if options.nccl else None
    try:
        found = facts({"LD_PRELOAD": nccl} if nccl else None)
    except RuntimeError as error:
        print(f"bench.gpu: {str(error).removeprefix('bench.gpu: ')}", file=sys.stderr)
        return 2
    # An interrupted run ends its stage, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.out or ROOT / "out" / slug(found["device"])
    if options.fresh:
        shutil.rmtree(folder / "stages", ignore_errors=True)
    taken = time.monotonic() - began
    seconds = None if options.minutes is None else options.minutes * 60 - taken
    say = partial(print, flush=True)
    runner = Runner(folder.resolve(), found["device"], source_of, seconds, say, options.archive)
    chosen = [each for each in stages(found, nccl) if options.only in each.name]
    records = runner.run(chosen)
    meta = {**found, "commit": commit(), "date": datetime.date.today().isoformat()}
    for path in page.write(folder, records, meta):
        say(f"wrote {path}")
    runner.save()
    statuses = {record.status for record in records}
    if statuses & {FAILED, NO_GPU}:
        return 1
    return 3 if statuses & {NO_TIME, OVERRUN} else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Run all that a machine with a GPU is asked, in order of worth; call it again "
        "to go on. Status: 0, 1 where a stage failed, 2 without a GPU, 3 where one is to do.",
    )
    parser.add_argument("--minutes", type=float, help="begin no stage that does not fit in them")
    parser.add_argument("--fresh", action="store_true", help="run also what is done")
    parser.add_argument("--only", default="", metavar="TEXT", help="stages with TEXT in their name")
    parser.add_argument(
        "--nccl",
        type=Path,
        metavar="PATH",
        help="a libnccl.so.2 of 2.30 or newer, or what cut_nccl made of it, for ranks on one GPU",
    )
    parser.add_argument(
        "--archive", type=Path, metavar="FILE", help="a .tar.gz of all results, to go on from"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="results (out/<the GPU's name>)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
