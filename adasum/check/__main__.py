"""`python -m adasum.check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import adasum.check
from adasum.check import checks, supervisor
from adasum.check.checks import say
from adasum.check.report import report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report and a line for each check; return the exit status."""
    assert adasum.check.__doc__ is not None
    parser = argparse.ArgumentParser(
        prog="adasum.check", description=adasum.check.__doc__.splitlines()[0]
    )
    parser.add_argument("--no-self-test", action="store_true", help="test nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs=3, default=checks.SIZES, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="CHECK", help="only these, and no report")
    options = parser.parse_args(argv)
    known = checks.checks()
    if unknown := [name for name in options.names if name not in known]:
        why = "" if torch.cuda.is_available() else f"; {checks.NO_GPU}"
        parser.error(f"no check {unknown[0]!r}: there are {', '.join(known)}{why}")
    if options.here:
        return checks.run_here(options.names, sizes=options.sizes)
    if not options.names:
        say("\n".join(report()))
        if options.no_self_test:
            say("self-test: left out")
            return 0
        say("checks:")
    passed = supervisor.supervise(options.names or [*known], say)
    if not options.names and not torch.cuda.is_available():
        say(checks.line(checks.LEFT_OUT, "those of a GPU", 0.0, checks.NO_GPU))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
