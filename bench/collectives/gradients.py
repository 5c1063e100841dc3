"""A step's gradients of real models, reduced one by one, packed, in fused groups and in place.

    torchrun --nproc-per-node 2 -m bench.collectives.gradients
    torchrun --nproc-per-node 4 -m bench.collectives.gradients --op adasum -J out.json

The lists are in the order in which backward produces them. "one by one" is an all-reduce for each
tensor; "small packed" packs neighbours of up to 64 KiB, 32 at most, before; "fused" packs groups of
25 MiB; "in place" has the gradients lie in the groups' buffers (`FusedBuffer`), as the optimizer
keeps them. Every call is asynchronous and the step waits at its end. torch's rows are its
all_reduce, one by one and of flat buckets of 25 MiB that already hold the gradients. A step is
timed on the slowest rank; contenders take turns. A wrong result makes the exit status 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
from bench import shapes
from bench.collectives import answer, ranks
from bench.collectives.ranks import OPS
from bench.kernels.timing import Times
from collectives.fused_buffer import FusedBuffer
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.tools.bench import started

# The LeNet of examples/train_digits.py: what small messages cost.
_LENET: list[shapes.Shape] = [
    *((8, 1, 3, 3), (8,), (16, 8, 3, 3), (16,)),
    *((64, 64), (64,), (10, 64), (10,)),
]
MODELS: dict[str, Callable[[], list[shapes.Shape]]] = {
    "lenet": lambda: _LENET,
    "resnet50": shapes.resnet50,
    "bert_large": shapes.bert_large,
    "llama_7b_layer": shapes.llama_7b_layer,
}
BUCKET_MIB = 25.0
SMALL_BYTES, SMALL_GROUP = 64 * 1024, 32
BASE = "one by one"
Contender = tuple[list[Tensor], Callable[[], None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run on every rank; rank 0 prints. Return 1 where a result was wrong."""
    parser = ranks.make_parser("gradients", __doc__, iters=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50", "bert_large"])
    parser.add_argument("--op", choices=OPS, default="sum")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    with started(parser) as (group, device):
        facts = ranks.environment(group, device)
        rows = [row for model in args.models for row in _rows(group, model, args)]
    wrong = [f"{row['model']}, {row['way']}" for row in rows if not row["right"]]
    if group.rank == 0:
        print(ranks.heading(facts))
        print(f"{'model':16} {'op':7} {'way':22} {'ms':>9} {'quartiles':>17}  one by one / this")
        for row in rows:
            low, high = row["quartiles"]
            print(
                f"{row['model']:16} {row['op']:7} {row['way']:22} {row['ms']:9.2f} "
                f"{f'{low:.2f}-{high:.2f}':>17}  {row['speedup']:.2f}"
            )
        ranks.write(args.output_file, {"environment": facts, "rows": rows})
        if wrong:
            print(f"wrong: {wrong}", file=sys.stderr)
    return int(bool(wrong))


def _rows(group: collectives.Group, model: str, args: Any) -> list[dict[str, Any]]:
    dtype, op = getattr(torch, args.dtype), OPS[args.op]
    generator = torch.Generator().manual_seed(group.rank)
    # Views of one pool: a large model's gradients are in memory twice already.
    counts = [math.prod(shape) for shape in reversed(MODELS[model]())]
    pool = torch.randn(max(counts) + len(counts), generator=generator).to(dtype)
    source = [
        pool[i : i + count].view(shape)
        for i, (count, shape) in enumerate(zip(counts, reversed(MODELS[model]()), strict=True))
    ]
    plan = collectives.plan_groups(source, memory_size=BUCKET_MIB)
    contenders = _contenders(group, source, plan, op)
    right = _check(group, contenders, source, args.op)

    def prepared(name: str) -> Callable[[], object]:
        tensors, step = contenders[name]
        torch._foreach_copy_(tensors, source)
        return step

    taken = ranks.slowest(ranks.in_turns(contenders, prepared, args.iters))
    times = {name: Times.of(seconds) for name, seconds in taken.items()}
    return [
        {
            "model": model,
            "op": args.op if not name.startswith("torch") else "sum",
            "dtype": args.dtype,
            "tensors": len(source),
            "bytes": sum(tensor.nbytes for tensor in source),
            "way": name,
            "ms": each.median * 1e3,
            "quartiles": [each.low * 1e3, each.high * 1e3],
            "speedup": times[BASE].median / each.median,
            "right": right[name],
        }
        for name, each in times.items()
    ]


def _contenders(
    group: collectives.Group,
    source: Sequence[Tensor],
    plan: Sequence[Sequence[int]],
    op: collectives.Reducer,
) -> dict[str, Contender]:
    """Return each contender's gradients, and a step that reduces them in place."""
    mine = [each.clone() for each in source]
    buckets = [FusedBuffer([source[i] for i in members]) for members in plan]
    views = [view for bucket in buckets for view in bucket.views]
    order = [i for members in plan for i in members]
    inside = [view for _, view in sorted(zip(order, views, strict=True), key=itemgetter(0))]
    torch._foreach_copy_(inside, mine)

    def one_by_one() -> None:
        ranks.wait_for(group.all_reduce(each, op, async_op=True) for each in mine)

    def small_packed() -> None:
        packed, packing = collectives.pack_small_tensors(mine, SMALL_BYTES, SMALL_GROUP)
        ranges = packing.ranges if packing is not None else ()
        bounds: list[list[int] | None] = [
            [0, *accumulate(each.numel() for each in mine[first : last + 1])]
            for first, last in ranges
        ]
        bounds += [None] * (len(packed) - len(bounds))
        ranks.wait_for(
            group.all_reduce(tensor, op, segments=segments, async_op=True)
            for tensor, segments in zip(packed, bounds, strict=True)
        )
        torch._foreach_copy_(mine, collectives.unpack_small_tensors(packed, packing))

    def grouped(groups: Sequence[Sequence[Tensor]]) -> None:
        ranks.wait_for(group.grouped_all_reduce(each, op, async_op=True) for each in groups)

    def torch_reduces(tensors: Sequence[Tensor]) -> None:
        ranks.wait_for(dist.all_reduce(each, async_op=True) for each in tensors)

    return {
        BASE: (mine, one_by_one),
        "small packed": (mine, small_packed),
        "fused": (mine, lambda: grouped([[mine[i] for i in members] for members in plan])),
        "in place": (inside, lambda: grouped([bucket.tensors for bucket in buckets])),
        "torch, one by one": (mine, lambda: torch_reduces(mine)),
        "torch, flat buckets": (inside, lambda: torch_reduces([each.buffer for each in buckets])),
    }


def _check(
    group: collectives.Group, contenders: dict[str, Contender], source: Sequence[Tensor], op: str
) -> dict[str, bool]:
    """Return whether each contender's result is that of the gradients in float64."""
    tree = answer.tree_of(*parse_all_reduce_spec("auto"), group.topology)
    right = {}
    for name, (tensors, step) in contenders.items():
        torch._foreach_copy_(tensors, list(source))
        step()
        kind = "sum" if name.startswith("torch") else op
        wrong = 0
        for mine, found in zip(source, tensors, strict=True):
            wrong += answer.count_wrong(found.view(-1), answer.expected(mine.view(-1), kind, tree))
        right[name] = not wrong
    return right


if __name__ == "__main__":
    raise SystemExit(main())
