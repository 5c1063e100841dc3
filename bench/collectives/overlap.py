"""How much of the gradients' reduction is hidden behind backward.

    torchrun --nproc-per-node 2 -m bench.collectives.overlap

A step of a multi-layer perceptron is timed three ways in turns: backward alone, the reduction of
its buckets alone, and both as DistributedOptimizer runs them, where a bucket is sent as soon as its
last gradient is there. hidden = 1 - (both - backward) / reduction: 1 where the reduction costs no
time beside backward, 0 where it might as well come after it. Ranks that share processors with their
communication threads can hide the waiting of a reduction, not its computing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import collectives
from adasum import DistributedOptimizer
from bench.collectives import ranks
from bench.collectives.ranks import OPS
from collectives.tools.bench import started

WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run on every rank; rank 0 prints."""
    parser = ranks.make_parser("overlap", __doc__, iters=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512, help="examples a rank and step")
    parser.add_argument("--bucket", type=float, default=2.0, help="MiB")
    parser.add_argument("--op", choices=OPS, default="avg")
    parser.add_argument("--in-backward", action="store_true", help="Adasum's steps in backward")
    args = parser.parse_args(argv)
    with started(parser) as (group, device):
        answer = {**ranks.environment(group, device), **_measure(group, args)}
    if answer["rank"] == 0:
        for key, value in answer.items():
            print(f"{key:14} {value:.3f}" if isinstance(value, float) else f"{key:14} {value}")
        ranks.write(args.output_file, answer)
    return 0


def _measure(group: collectives.Group, args: Any) -> dict[str, Any]:
    plain, wrapped = (_model(args) for _ in range(2))
    options = {"method": "delta" if args.in_backward else "gradient"} if args.op == "adasum" else {}
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1e-3),
        wrapped.named_parameters(),
        op=OPS[args.op],
        memory_size=args.bucket,
        step_in_backward=args.in_backward,
        **options,
    )
    inputs = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(1))
    parameters = list(reversed(list(plain.parameters())))
    plan = collectives.plan_groups(parameters, memory_size=args.bucket)
    buckets = [collectives.FusedBuffer([parameters[i] for i in members]) for members in plan]

    def backward() -> Callable[[], object]:
        plain.zero_grad()
        return plain(inputs).square().mean().backward

    def reduce_all() -> None:
        op = OPS[args.op]
        ranks.wait_for(
            group.grouped_all_reduce(each.tensors, op, async_op=True) for each in buckets
        )

    def both() -> Callable[[], object]:
        if not args.in_backward:
            # Untimed, with the gradients of the turn before.
            optimizer.step()
        optimizer.zero_grad()
        loss = wrapped(inputs).square().mean()

        def run() -> None:
            loss.backward()
            if args.in_backward:
                optimizer.step()

        return run

    if not args.in_backward:
        wrapped(inputs).square().mean().backward()
    ways = {"backward": backward, "reduction": lambda: reduce_all, "both": both}
    samples = ranks.slowest(ranks.in_turns(ways, lambda name: ways[name](), WARM_UP + args.iters))
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in samples.items()}
    return {
        "rank": group.rank,
        "op": args.op,
        "bytes": sum(each.nbytes for each in parameters),
        "buckets": len(buckets),
        **{f"{name} ms": value * 1e3 for name, value in seconds.items()},
        "hidden": 1.0 - (seconds["both"] - seconds["backward"]) / seconds["reduction"],
    }


def _model(args: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    pairs = ((torch.nn.Linear(args.width, args.width), torch.nn.Tanh()) for _ in range(args.layers))
    return torch.nn.Sequential(*(layer for pair in pairs for layer in pair))


if __name__ == "__main__":
    raise SystemExit(main())
