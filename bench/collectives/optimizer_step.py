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
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

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
    parser.add_argument("-J", "--json", type=Path, help="of a rank: where its figures go")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        _rank(args)
        return 0
    # Not at the top: a rank of the other checkout may have no such module.
    from bench.processes import in_turns

    trees = {"this": HERE.parents[2]}
    if args.against is not None:
        trees["other"] = args.against.resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), str(HERE)]
    command += ["--model", args.model, "--steps", str(args.steps)]
    rounds: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _, tree, found in in_turns(dict.fromkeys(trees, command), args.rounds, trees):
        rounds[tree].append(found)
    for method in METHODS:
        times = {tree: [each[method] for each in rounds[tree]] for tree in trees}
        row = f"{method:20} {median(times['this']) * 1e3:8.2f} ms"
        if "other" in times:
            ratios = [a / b for a, b in zip(times["this"], times["other"], strict=True)]
            low, high = _interval(ratios)
            row += (
                f"  other {median(times['other']) * 1e3:8.2f} ms  ratio {median(ratios):.3f} "
                f"(95 %: {low:.3f}-{high:.3f}, all: {min(ratios):.3f}-{max(ratios):.3f})"
            )
        print(row)
    # What a running check takes, of the steps between two of them.
    seconds = median(each[CHECK] for each in rounds["this"])
    quickest = min(median(each[name] for each in rounds["this"]) for name in METHODS)
    part = f"{seconds / (CHECK_EVERY * quickest):.3%} of the quickest method's"
    print(f"{CHECK:20} {seconds * 1e3:8.2f} ms  every {CHECK_EVERY} steps, {part}")
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


def _rank(args: argparse.Namespace) -> None:
    """Write the median seconds of a step, by method, and of a running check."""
    import adasum
    import collectives
    from bench import shapes

    group = collectives.init(timeout=60.0)

    def seconds(call: Callable[[], object], times: int) -> list[float]:
        """Return the slowest rank's seconds of each call."""
        samples = []
        for _ in range(times):
            group.barrier()
            begin = time.perf_counter()
            call()
            mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            samples.append(max(group.all_gather(mine).tolist()))
        return samples

    medians = {}
    for name, (op, options) in METHODS.items():
        generator = torch.Generator().manual_seed(group.rank)
        parameters = [torch.nn.Parameter(torch.zeros(each)) for each in shapes.MODELS[args.model]]
        gradients = [torch.randn(each.shape, generator=generator) for each in parameters]
        optimizer: Any = adasum.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.01, momentum=0.9), op=getattr(adasum, op), **options
        )

        step = partial(_step, optimizer, parameters[::-1], gradients[::-1])
        medians[name] = median(seconds(step, WARM_UP + args.steps)[WARM_UP:])
        if hasattr(optimizer, "_check_again"):
            # Over all parts of the parameters.
            optimizer._adasum_check._every = 1
            medians[CHECK] = median(seconds(optimizer._adasum_check.run_again, CHECKS))
    if group.rank == 0:
        args.json.write_text(json.dumps(medians))
    collectives.shutdown()


def _step(optimizer: Any, parameters: list[torch.nn.Parameter], gradients: list[Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(parameters, gradients)
    optimizer.step()


if __name__ == "__main__":
    raise SystemExit(main())
