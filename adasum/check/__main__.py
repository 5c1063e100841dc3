"""A report to attach to an issue: installed packages, usable transports, and checks.

    python -m adasum.check                       # the report, then every check, one line each
    python -m adasum.check --no-self-test        # the report only
    python -m adasum.check kernels "two ranks"   # these checks only

The exit status is 1 if a line says FAILED, otherwise 0. `tests/kernels/gpu` tests a GPU thoroughly.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from adasum.check import checks, processes
from adasum.check.report import report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and one line for each check; return the exit status."""
    parser = argparse.ArgumentParser("adasum.check", description="What works on this machine.")
    parser.add_argument("--no-self-test", action="store_true", help="test nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="CHECK", help="only these, and no report")
    options = parser.parse_args(argv)
    known = checks.checks()
    left_out = "" if torch.cuda.is_available() else checks.NO_GPU
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no check {unknown[0]!r}: there are {', '.join(known)}; {left_out}")
    if options.here:
        return processes.run_here(known[options.names[0]].run)
    if not options.names:
        print("\n".join(report()))
        print("self-test: left out" if options.no_self_test else "checks:", flush=True)
    if options.no_self_test:
        return 0
    failed = False
    for name in options.names or known:
        line = processes.run(name, known[name].ranks)
        failed |= line.startswith(processes.FAILED)
        print(line, flush=True)
    if left_out and not options.names:
        print(processes.line("left out", "checks of a GPU", 0.0, left_out))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
