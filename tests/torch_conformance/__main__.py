"""Run torch's tests of DDP and of a backend, and its optimizers, from its wheel, over adasum.

    python -m tests.torch_conformance

from the root of this repository, with nothing but torch and pytest. `--only` and `--ranks` choose
less. The tests run on the CPU, over gloo, first with torch by itself and then with adasum's hook:
what fails in the first run is lost by the CPU in the place of GPUs, and what fails in the second
alone by the hook. torch's tests of a backend run by gloo, and by the backend "adasum" in its place.
expected.py has the reason for each that is lost. Anything else, also a pass of what should
fail, is an error. It takes six minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import time
from collections import Counter
from pathlib import Path

from tests.torch_conformance.batch import Outcome, run
from tests.torch_conformance.expected import NOT_BY_ADASUM, REFUSALS, expected


def report(title: str, size: int, hook: bool, outcomes: dict[str, Outcome]) -> bool:
    """Print what did not pass, with the reason; return whether all of it is as expected."""
    count = Counter(each.outcome for each in outcomes.values())
    seconds = sum(each.seconds for each in outcomes.values())
    print(
        f"{title}, {size} ranks, {'with adasum' if hook else 'torch by itself'}: "
        f"{count['passed']} of {len(outcomes)} passed, {count['skipped']} skipped themselves, "
        f"{count['failed']} failed, in {seconds:.0f} s",
        flush=True,
    )
    good = True
    for name, (outcome, said, _) in sorted(outcomes.items()):
        wanted, reason = expected(name, size, hook)
        if outcome != wanted or REFUSALS.get(reason, "") not in said:
            good = False
            print(
                f"  UNEXPECTED: {name} {outcome}, where it should have {wanted}: {said or reason}"
            )
        elif outcome != "passed":
            print(f"  {outcome} {name}: {reason}")
    return good


def compare(gloo: dict[str, Outcome], adasum: dict[str, Outcome]) -> bool:
    """Return whether all tests that pass by gloo pass by adasum, but for those with a reason."""
    passed = [name for name, each in gloo.items() if each.outcome == "passed"]
    lost = [name for name in passed if adasum[name].outcome != "passed"]
    unexpected = [name for name in lost if name not in NOT_BY_ADASUM]
    share = 1 - len(lost) / max(len(passed), 1)
    print(f"{len(passed)} pass by gloo, {share:.1%} of them by adasum, too", flush=True)
    for name in lost:
        said = NOT_BY_ADASUM.get(name, f"UNEXPECTED: {adasum[name].said}")
        print(f"  {adasum[name].outcome} {name}: {said}")
    return not unexpected


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_conformance", description=__doc__)
    parser.add_argument("--only", default="", help="tests, or a suite, with this in their name")
    parser.add_argument("--ranks", type=int, help="one of the numbers of ranks of each suite")
    parser.add_argument("--logs", type=Path, help="a folder for what the ranks print")
    args = parser.parse_args()
    # torch's test modules read them when they are imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2")
    from tests.torch_conformance.suites import SUITES

    good, count, start = True, 0, time.monotonic()
    for key, where in SUITES.items():
        suite = pkgutil.resolve_name(where)
        names = [name for name in suite.names() if args.only in name or args.only == key]
        for size in suite.sizes if names else ():
            if args.ranks not in (None, size):
                continue
            if suite.compared:
                both = [run(where, names, size, ours, args.logs) for ours in (False, True)]
                print(f"{suite.title}, {size} ranks: ", end="")
                good &= compare(*both)
                count += 2 * len(names)
                continue
            for hook in (False, True) if suite.alone else (True,):
                outcomes = run(where, names, size, hook, args.logs)
                good &= report(suite.title, size, hook, outcomes)
                count += len(outcomes)
    print(f"{count} runs of tests in {time.monotonic() - start:.0f} s", flush=True)
    if not count:
        raise SystemExit(f"--only {args.only!r} with --ranks {args.ranks}: there is no such test")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
