"""All-reduce over all ranks, ours beside torch.distributed's, with nccl-tests' flags and columns.

    torchrun --nproc-per-node 4 -m bench.collectives.all_reduce -b 8 -e 128M -f 2 -a xring,rd
    torchrun --nproc-per-node 4 -m bench.collectives.all_reduce -d float16 -o adasum -a vhdd
    torchrun --nproc-per-node 4 -m bench.collectives.all_reduce --model -b 4K -e 16M -f 4

size is a rank's buffer in bytes. time is the median over the iterations of the slowest rank's time
for a call; algbw is size / time, busbw 2 (n - 1) / n of it. In every iteration each contender runs
a block of calls after a barrier, in turns, so that a machine that slows down slows all of them.
#wrong counts elements of all ranks that are further from a float64 evaluation than rounding
explains. Adasum stands beside torch's sum, since torch has no Adasum; -o avg beside its sum and a
division; -o tree, a sum of order="tree", beside our sum without an order, too. --model compares
with the cost model's prediction instead, from link rates calibrated in the same run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
from bench.collectives import answer, ranks
from bench.collectives import cost_model as model
from bench.collectives.ranks import OPS
from bench.collectives.row import Row, header, line
from collectives.execution.phases import phases_of
from collectives.schedules.spec import parse_all_reduce_spec, spec_for
from collectives.tools.bench import DTYPES, add_flags, dtype_of, finish, sizes_of, started

TORCH = "torch"
UNORDERED = "no order"
_DEFAULTS = {"sum": "xring,rechd,rd", "avg": "xring,rechd,rd", "adasum": "vhdd,rd", "tree": "auto"}
# How long a block lasts, much longer than ranks take to leave a barrier; its calls at most.
_BLOCK_SECONDS, _BLOCK_CALLS = 2e-3, 10
# A call that takes longer than this, and so many times as long as the fastest, is not repeated.
_HOPELESS_SECONDS, _HOPELESS = 0.1, 3


class Bench:
    """The contenders of one operator on one group."""

    def __init__(self, group: collectives.Group, device: torch.device, args: Any) -> None:
        self._group = group
        self._device = device
        self._args = args

    def rows(self, op: str, algorithms: Sequence[str], size: int) -> list[Row]:
        """Return a row for each contender, torch's first."""
        args, group = self._args, self._group
        dtype = DTYPES[args.datatype]
        count = size // dtype.itemsize
        source = answer.inputs(count, dtype, group.rank, seed=count).to(self._device)
        tensor = torch.empty_like(source)
        calls: dict[str, Callable[[], object]] = {TORCH: lambda: dist.all_reduce(tensor)}
        if op == "avg":
            calls[TORCH] = lambda: (dist.all_reduce(tensor), tensor.div_(group.size))
        if op == "tree":
            calls[UNORDERED] = lambda: group.all_reduce(tensor)
        for name in algorithms:
            calls[name] = partial(group.all_reduce, tensor, OPS[op], algorithm=name)
        wrong = self._wrong(calls, source, tensor, op) if args.check else dict.fromkeys(calls)
        seconds = self._time(calls, source, tensor)
        return [
            Row(count, dtype, _redop(op, name), name, group.size, seconds[name], wrong[name])
            for name in calls
        ]

    def _wrong(
        self, calls: Mapping[str, Callable[[], object]], source: Tensor, tensor: Tensor, op: str
    ) -> dict[str, int | None]:
        """Return how many elements each contender gets wrong, over args.check calls."""
        topology = self._group.topology
        answers: dict[str, answer.Slice] = {}
        wrong: dict[str, int | None] = {}
        for name, call in calls.items():
            redop, tree = _redop(op, name).replace("tree", "sum"), None
            if redop == "adasum":
                spec = spec_for(parse_all_reduce_spec(name), source.numel())
                tree = answer.tree_of(spec, topology)
            key = f"{redop} {tree}"
            if key not in answers:
                # One expected result at a time: it is four times a float32 buffer.
                answers = {key: answer.expected(source, redop, tree)}
            total = 0
            for _ in range(self._args.check):
                tensor.copy_(source)
                call()
                total += answer.count_wrong(tensor, answers[key])
            wrong[name] = total
        return wrong

    def _time(
        self, calls: Mapping[str, Callable[[], object]], source: Tensor, tensor: Tensor
    ) -> dict[str, list[float]]:
        """Return the seconds of one call by iteration, of the slowest rank."""

        def prepared(name: str) -> Callable[[], object]:
            tensor.copy_(source)
            return calls[name]

        wait = partial(finish, self._device)
        warm_up = dict.fromkeys(calls, max(1, self._args.warmup_iters))
        ranks.in_turns(calls, prepared, 1, wait, warm_up)
        once = ranks.slowest(ranks.in_turns(calls, prepared, 1, wait))
        times = {
            name: min(max(1, math.ceil(_BLOCK_SECONDS / each)), _BLOCK_CALLS)
            for name, (each,) in once.items()
        }
        # One sample of what is far behind is enough.
        hopeless = max(_HOPELESS_SECONDS, _HOPELESS * min(each for (each,) in once.values()))
        rest = [name for name, (each,) in once.items() if each <= hopeless]
        turn = sum(times[name] * once[name][0] for name in rest)
        iterations = max(self._args.iters, int(self._args.seconds / turn))
        samples = ranks.slowest(ranks.in_turns(rest, prepared, iterations, wait, times))
        return {name: samples.get(name, once[name]) for name in calls}


def _redop(op: str, name: str) -> str:
    beside = op == "tree" or (name == TORCH and op == "adasum")
    return "sum" if beside and name in (TORCH, UNORDERED) else op


def main(argv: Sequence[str] | None = None) -> int:
    """Run on every rank; rank 0 prints. Return 1 where an element was wrong, 2 for bad options."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        sizes, ops = sizes_and_algorithms(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    with started(parser, args.device) as (group, device):
        try:
            _check(args, group, device, ops)
            return run(args, group, device, sizes, ops)
        except ValueError as error:
            # All ranks raise the same error; one line of it is enough.
            if group.rank == 0:
                print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2


def _check(
    args: Any, group: collectives.Group, device: torch.device, ops: Mapping[str, Sequence[str]]
) -> None:
    """Raise ValueError for what cannot be run on this group."""
    group.transport.check_device(device)
    for op, name in ((op, name) for op, names in ops.items() for name in names):
        for spec in parse_all_reduce_spec(name):
            if spec.outer != "auto":
                phases_of(spec, OPS[op], group.topology)
        if args.model and op == "tree":
            raise ValueError("--model does not know -o tree: use -o sum, which costs the same")
        if args.model:
            model.check(name, op, group.topology)


def run(
    args: Any,
    group: collectives.Group,
    device: torch.device,
    sizes: Sequence[int],
    ops: Mapping[str, Sequence[str]],
) -> int:
    def say(*lines: str) -> None:
        if group.rank == 0:
            print(*lines, sep="\n", flush=True)

    facts = ranks.environment(group, device)
    width = max(len(name) for names in ops.values() for name in [*names, "algorithm"])
    say(ranks.heading(facts), *header(width))
    bench = Bench(group, device, args)
    found: list[Row] = []
    compared: list[model.Comparison] = []
    # Link rates drift with whatever else the machine does, so they are measured around every size.
    machines = [model.measured_rates(group, device)] if args.model else []
    for size in sizes:
        for op, names in ops.items():
            rows = bench.rows(op, names, size)
            say(*(line(row, rows[0], width) for row in rows))
            found += rows
            if args.model:
                machines = [machines[-1], model.measured_rates(group, device)]
                samples = {row.algorithm: row.seconds for row in rows[1:]}
                compared.append(model.compare(op, rows[0].size, samples, machines, group.topology))
    wrong = sum(row.wrong or 0 for row in found)
    found_wrong = f"# Wrong elements: {wrong} {'FAILED' if wrong else 'OK'}"
    say(found_wrong if args.check else "# Not checked")
    if args.model:
        say("", *model.report(compared))
    if group.rank == 0:
        record: dict[str, Any] = {"arguments": vars(args), "environment": facts}
        record |= {"results": [row.record() for row in found]}
        ranks.write(args.output_file, record | {"model": [each.record() for each in compared]})
    return int(wrong > 0)


def sizes_and_algorithms(args: Any) -> tuple[list[int], dict[str, list[str]]]:
    """Check the options; return the sizes in bytes, and the algorithms of each operator."""
    args.datatype = dtype_of(args.datatype)
    ops = {}
    for op in args.op.split(","):
        if op not in OPS:
            raise ValueError(f"-o must be of {', '.join(OPS)}, got {op!r}")
        names = (args.algorithm or _DEFAULTS[op]).split(",")
        for name in names:
            parse_all_reduce_spec(name)
        OPS[op].check(DTYPES[args.datatype])
        if op == "avg" and not DTYPES[args.datatype].is_floating_point:
            raise ValueError("-o avg needs a floating -d: torch averages no integers")
        ops[op] = names
    return sizes_of(args), ops


def make_parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser("all_reduce", __doc__, iters=20)
    add_flags(parser)
    parser.add_argument("--seconds", type=float, default=0, help="of a size's iterations, at least")
    parser.add_argument(
        "-o", "--op", default="sum", help="sum, avg, adasum, tree; several with commas"
    )
    parser.add_argument("-a", "--algorithm", help="specification strings, with commas")
    parser.add_argument("--model", action="store_true", help="compare with the cost model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
