"""A step of the distributed optimizer on a model's parameters, between ranks on this machine.

    python -m bench.collectives.optimizer_step --ranks 2
    python -m bench.collectives.optimizer_step --ranks 2 --against ../old-checkout

A step is zero_grad, a backward that hands every parameter a gradient, and SGD's step, timed on the
slowest rank. With --against another checkout runs the same steps by this file, in processes that
alternate with this one's, and each row has the ratio of the medians (this / other) and the spread
of the ratios from round to round. The last row is the running check of the parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "average": ("Average", {}),
    "adasum of gradients": ("Adasum", {"method": "gradient"}),
    "adasum of steps": ("Adasum", {}),
}
WARM_UP = 3
# What DistributedOptimizer does by default, and checks that are timed.
CHECK, CHECK_EVERY, CHECKS = "running check", 100, 21


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and print a row a method; in a rank, run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet-50", help="a name of bench.shapes.MODELS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        _rank(args.model, args.steps)
        return 0
    trees = {"this": HERE.parents[2]}
    if args.against is not None:
        trees["other"] = args.against.resolve()
    rounds: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(args.rounds):
        # Each takes the lead in turn, so that neither gets the quieter half of the rounds.
        for tree in sorted(trees, reverse=bool(number % 2)):
            rounds[tree].append(_run(trees[tree], args))
    for method in METHODS:
        times = {tree: [each[method] for each in rounds[tree]] for tree in trees}
        row = f"{method:20} {statistics.median(times['this']) * 1e3:8.2f} ms"
        if "other" in times:
            ratios = [a / b for a, b in zip(times["this"], times["other"], strict=True)]
            low, high = _interval(ratios)
            row += (
                f"  other {statistics.median(times['other']) * 1e3:8.2f} ms"
                f"  ratio {statistics.median(ratios):.3f} (95 %: {low:.3f}-{high:.3f}, "
                f"all: {min(ratios):.3f}-{max(ratios):.3f})"
            )
        print(row)
    _print_check(rounds["this"])
    return 0


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds of the median that hold for at least 95 of 100 samples, whatever is sampled.

    By order: that the median lies below the k-th smallest of n is as likely as fewer than k heads
    of n coins. Of fewer than six values it is the smallest and the largest.
    """
    n = len(values)
    below = [sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(n)]
    k = max([k for k in range(1, n) if below[k] <= 0.025], default=1)
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def _print_check(rounds: Sequence[dict[str, float]]) -> None:
    """Print what a running check takes, of the steps between two of them."""
    seconds = statistics.median(each[CHECK] for each in rounds)
    steps = CHECK_EVERY * min(statistics.median(each[name] for each in rounds) for name in METHODS)
    print(
        f"{CHECK:20} {seconds * 1e3:8.2f} ms  every {CHECK_EVERY} steps, "
        f"{seconds / steps:.3%} of the quickest method's"
    )


def _run(tree: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step by method, measured in new processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), str(HERE)]
    command += ["--model", args.model, "--steps", str(args.steps)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _rank(model: str, steps: int) -> None:
    import adasum
    import collectives
    from bench import shapes

    group = collectives.init(timeout=60.0)
    medians = {}
    for name, (op, options) in METHODS.items():
        generator = torch.Generator().manual_seed(group.rank)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.MODELS[model]]
        gradients = [torch.randn(each.shape, generator=generator) for each in parameters]
        optimizer = adasum.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.01, momentum=0.9), op=getattr(adasum, op), **options
        )
        seconds = []
        for step in range(WARM_UP + steps):
            group.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(parameters[::-1], gradients[::-1])
            optimizer.step()
            mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            if step >= WARM_UP:
                seconds.append(max(group.all_gather(mine).tolist()))
        medians[name] = statistics.median(seconds)
        if hasattr(optimizer, "_check_again"):
            medians[CHECK] = _time_check(optimizer, group)
    rank = group.rank
    collectives.shutdown()
    if rank == 0:
        print(json.dumps(medians), flush=True)


def _time_check(optimizer: Any, group: Any) -> float:
    """Return the median seconds of a running check, over all parts of the parameters."""
    check, seconds = optimizer._adasum_check, []
    check._every = 1
    for _ in range(CHECKS):
        group.barrier()
        begin = time.perf_counter()
        check.run_again()
        mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        seconds.append(max(group.all_gather(mine).tolist()))
    return statistics.median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
