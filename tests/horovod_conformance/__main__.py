"""Run Horovod's own tests of PyTorch over adasum, untouched, from a checkout of Horovod 0.28.1.

    git clone -b v0.28.1 https://github.com/horovod/horovod /tmp/horovod
    python -m tests.horovod_conformance /tmp/horovod

from the root of this repository. `--ranks`, `--file` and `-k` choose less.

Some tests train another model on each rank, which is an error here unless ADASUM_CHECK_PARAMETERS
is 0: it is that for the test files, and the example runs with the check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.horovod_conformance.expected import CPU_FOR_GPUS, DIFFERENT, SKIPPED
from tests.processes.harness import free_port, on_one_node

ROOT = Path(__file__).parents[2]
TORCH, ADASUM = "test/parallel/test_torch.py", "test/parallel/test_adasum_pytorch.py"
EXAMPLE = "examples/pytorch/pytorch_mnist.py"
RUNS = ((TORCH, 2), (ADASUM, 2), (ADASUM, 3), (ADASUM, 4), (EXAMPLE, 2))
# Seconds for a file, and that a collective waits for a rank whose test has failed already.
SECONDS, TIMEOUT = 1800.0, 15.0
# Files whose ranks do not compare their parameters at the first step.
UNCHECKED = (TORCH, ADASUM)


def run(
    checkout: Path,
    file: str,
    size: int,
    keyword: str = "",
    logs: Path | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, list[str]]:
    """Return the worst outcome of every test over the ranks, and its reason.

    logs: Where to write what each rank's pytest has printed.
    """
    path = checkout / file
    if not path.exists():
        raise SystemExit(f"{path} does not exist: give the path of a checkout of Horovod 0.28.1")
    port, second = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="horovod-") as directory:
        reports = [Path(directory, f"report{rank}") for rank in range(size)]
        ranks = []
        for rank, report in enumerate(reports):
            # HOROVOD_RANK as horovodrun --gloo sets it: tests then take their ways of gloo.
            variables = {
                **on_one_node(rank, size, port),
                "CONFORMANCE_PORT": str(second),
                "CONFORMANCE_TIMEOUT": str(timeout),
                "ADASUM_CHECK_PARAMETERS": "0" if file in UNCHECKED else "1",
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                # The example locks a file there.
                "HOME": directory,
            }
            command = [sys.executable, "-m", f"{__package__}.rank", str(path), str(report), keyword]
            with Path(directory, f"log{rank}").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **variables},
                        cwd=directory,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            for each in ranks:
                each.wait(SECONDS)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        for rank, report in enumerate(reports):
            log = Path(directory, f"log{rank}").read_text(errors="replace")
            if logs is not None:
                (logs / f"{path.stem}.{size}.{rank}.log").write_text(log)
            if not report.exists():
                raise SystemExit(f"rank {rank} of {size} ended before its tests:\n{log[-3000:]}")
        return worst([json.loads(report.read_text()) for report in reports])


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
    parser.add_argument("--logs", type=Path, help="a folder for what the ranks print")
    args = parser.parse_args()
    only = names.get(args.file)
    chosen = [
        (file, size) for file, size in RUNS if only in (None, file) and args.ranks in (None, size)
    ] or [(only or TORCH, args.ranks)]
    good = [
        report(file, size, run(args.checkout.resolve(), file, size, args.keyword, args.logs))
        for file, size in chosen
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
