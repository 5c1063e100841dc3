"""Run Horovod's own tests of PyTorch over adasum, untouched, from a checkout of Horovod 0.28.1.

    git clone -b v0.28.1 https://github.com/horovod/horovod /tmp/horovod
    python -m tests.horovod_conformance /tmp/horovod

from the root of this repository. `--ranks`, `--file` and `-k` choose less.

Some tests train another model on each rank, which is an error here unless ADASUM_CHECK_PARAMETERS
is 0: it is that for the test files, and the example runs with the check.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.horovod_conformance import rank
from tests.horovod_conformance.expected import CPU_FOR_GPUS, DIFFERENT, SKIPPED
from tests.processes.harness import free_port, run_ranks

TORCH, ADASUM = "test/parallel/test_torch.py", "test/parallel/test_adasum_pytorch.py"
EXAMPLE = "examples/pytorch/pytorch_mnist.py"
RUNS = ((TORCH, 2), (ADASUM, 2), (ADASUM, 3), (ADASUM, 4), (EXAMPLE, 2))
# Seconds for a file, and that a collective waits for a rank whose test has failed already.
SECONDS, TIMEOUT = 1800.0, 15.0
# Files whose ranks do not compare their parameters at the first step.
UNCHECKED = (TORCH, ADASUM)


def run(
    checkout: Path, file: str, size: int, keyword: str = "", timeout: float = TIMEOUT
) -> dict[str, list[str]]:
    """Return the worst outcome of every test over the ranks, and its reason."""
    path = checkout / file
    if not path.exists():
        raise SystemExit(f"{path} does not exist: give the path of a checkout of Horovod 0.28.1")
    with tempfile.TemporaryDirectory(prefix="horovod-") as directory:
        variables = {
            "CONFORMANCE_PORT": str(free_port()),
            "CONFORMANCE_TIMEOUT": str(timeout),
            "ADASUM_CHECK_PARAMETERS": "0" if file in UNCHECKED else "1",
            "HOROVOD_SIZE": str(size),
            # The example locks a file there.
            "HOME": directory,
        }
        return worst(run_ranks(size, rank.main, str(path), keyword, variables, timeout=SECONDS))


def worst(results: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Merge the ranks' outcomes: a failure before a skip, and that before a pass."""
    order = ("failed", "skipped", "passed")
    names = sorted({name for each in results for name in each})
    missing = ["failed", "did not run on every rank"]
    return {
        name: min((each.get(name, missing) for each in results), key=lambda r: order.index(r[0]))
        for name in names
    }


def report(file: str, size: int, outcomes: dict[str, list[str]]) -> bool:
    """Print what did not pass, with the reason; return whether all of it is known."""
    passed = {name for name, (outcome, _) in outcomes.items() if outcome == "passed"}
    skipped = {name for name, (outcome, _) in outcomes.items() if outcome == "skipped"}
    print(
        f"{Path(file).name}, {size} ranks: {len(passed)} of {len(outcomes)} passed "
        f"({len(passed & CPU_FOR_GPUS)} of them with the CPU in place of GPUs), "
        f"{len(skipped)} skipped themselves, {len(outcomes) - len(passed | skipped)} failed"
        + (", with ADASUM_CHECK_PARAMETERS=0" if file in UNCHECKED else ""),
        flush=True,
    )
    for name in sorted(passed & DIFFERENT.keys()):
        print(f"  {name} passed, though expected.py says why it does not")
    unknown = False
    for name, (outcome, said) in outcomes.items():
        if outcome != "passed":
            reason = {"failed": DIFFERENT, "skipped": SKIPPED}[outcome].get(name)
            unknown |= reason is None
            print(f"  {outcome} {name}: {reason or f'UNKNOWN: {said}'}")
    return not unknown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.horovod_conformance", description=__doc__
    )
    parser.add_argument("checkout", type=Path)
    names = {Path(file).name: file for file, _ in RUNS}
    parser.add_argument("--file", choices=names)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("-k", default="", dest="keyword", help="as pytest's")
    args = parser.parse_args()
    only = names.get(args.file)
    chosen = [
        (file, size) for file, size in RUNS if only in (None, file) and args.ranks in (None, size)
    ] or [(only or TORCH, args.ranks)]
    good = [
        report(file, size, run(args.checkout.resolve(), file, size, args.keyword))
        for file, size in chosen
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
