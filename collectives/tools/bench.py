"""Time and check all-reduces, with nccl-tests' flags and columns.

    python -m collectives.bench --ranks 4 -b 4K -e 16M -f 4
    torchrun --nproc-per-node 8 -m collectives.bench -b 8 -e 128M -o sum,avg -d float,half
    torchrun --nproc-per-node 4 -m collectives.bench -a xring,rd:16k:rechd -o adasum:Adasum

size is the length of each rank's buffer, reduced in place; time is the slowest rank's mean per
call; algbw is size / time, and busbw 2 (n - 1) / n of algbw: the bytes that each rank has to send
per time, comparable with the speed of the links for any number of ranks (nccl-tests,
doc/PERFORMANCE.md). #wrong counts wrong elements on all ranks; the exit status is 1 if there are
any. Your own operator, MODULE:NAME, is timed and not checked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

import collectives
from collectives import validation
from collectives.reducers import Average, Max, Min, Reducer, Sum
from collectives.schedules.spec import parse_all_reduce_spec, parse_general_int

DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
# Each operator with the torch function for the expected result.
_OPS: dict[str, tuple[Reducer, Callable[..., Tensor]]] = {
    "sum": (Sum, torch.sum),
    "avg": (Average, torch.mean),
    "max": (Max, torch.amax),
    "min": (Min, torch.amin),
}
# The number of elements to draw, and check, at a time.
_BLOCK = 1 << 20


def bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return nccl-tests' algbw and busbw of an all-reduce in GB/s."""
    algbw = size / seconds / 1e9
    return algbw, algbw * 2 * (ranks - 1) / ranks


def _inputs(count: int, dtype: torch.dtype, rank: int) -> Iterator[Tensor]:
    """Yield the input of `rank` on the CPU in blocks, the same in every process.

    Numbers are so small that every dtype holds the sums of 64 ranks exactly, in any order.
    """
    generator = torch.Generator().manual_seed(1_000_003 * count + rank)
    low, high = (-2, 3) if dtype.is_floating_point else (0, 2)
    for start in range(0, count, _BLOCK):
        shape = (min(_BLOCK, count - start),)
        yield torch.randint(low, high, shape, generator=generator).to(dtype)


def _count_wrong(result: Tensor, op: str, ranks: int) -> int:
    """Return the number of elements that differ from the rounded result in float64."""
    count, dtype, wrong = result.numel(), result.dtype, 0
    blocks = zip(*(_inputs(count, dtype, rank) for rank in range(ranks)), strict=True)
    for block, parts in enumerate(blocks):
        terms = torch.stack([part.double() for part in parts])
        value = _OPS[op][1](terms, 0)
        # Averages round twice: float16 is divided by a power of two first, all by the rest.
        eps = 2 * torch.finfo(dtype).eps if op == "avg" else 0.0
        found = result[block * _BLOCK :][: len(value)].cpu().double()
        # A NaN always counts as wrong.
        wrong += int(((found - value).abs() <= eps * value.abs()).logical_not().sum())
    return wrong


def _measure(
    group: Any, device: torch.device, algorithm: str, op: str, count: int, args: Any
) -> tuple[float, int | None]:
    """Return the slowest rank's seconds per call, and the number of wrong elements on all ranks.

    All ranks of the group must call it. The number is None if the results were not checked.
    """
    dtype, reducer = DTYPES[args.datatype], _operator_of(op)
    blocks = [*_inputs(count, dtype, group.rank), torch.empty(0, dtype=dtype)]
    source = torch.cat(blocks).to(device)
    tensor, wrong, seconds = source.clone(), 0, 0.0
    checks = args.check if op in _OPS else 0
    for _ in range(checks):
        tensor.copy_(source)
        group.all_reduce(tensor, reducer, algorithm=algorithm)
        wrong += _count_wrong(tensor, op, group.size)
    for times in (args.warmup_iters, args.iters):
        tensor.copy_(source)
        finish(device)
        group.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            group.all_reduce(tensor, reducer, algorithm=algorithm)
        finish(device)
        seconds = (time.perf_counter() - begin) / max(1, times)
    found = group.all_gather_bytes(json.dumps([seconds, wrong]).encode())
    every_seconds, every_wrong = zip(*map(json.loads, found), strict=True)
    return max(every_seconds), sum(every_wrong) if checks else None


def finish(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _operator_of(name: str) -> Reducer:
    """Return the operator of a name, or of MODULE:NAME; raise ValueError for others."""
    if name in _OPS:
        return _OPS[name][0]
    module, _, attribute = name.partition(":")
    try:
        return validation.reducer("op", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        names = ", ".join(_OPS)
        raise ValueError(f"-o must be of {names} or MODULE:NAME, got {name!r}: {error}") from None


def dtype_of(name: str) -> str:
    """Return torch's name for a dtype of nccl-tests; raise ValueError for unknown ones."""
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"-d must be one of {', '.join([*DTYPES, *_ALIASES])}, got {name}")
    return name


def sizes_of(args: argparse.Namespace) -> list[int]:
    """Return the sizes in bytes, by -b, -e and -f; ValueError names a wrong flag."""
    ends = []
    for flag, text in (("-b", args.minbytes), ("-e", args.maxbytes)):
        try:
            ends.append(parse_general_int(text.upper()))
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
    if ends[0] > ends[1]:
        raise ValueError(f"-b must not be more than -e, got {args.minbytes} and {args.maxbytes}")
    if args.stepfactor < 2 or args.iters < 1 or args.warmup_iters < 0 or args.check < 0:
        raise ValueError("-f must be at least 2, -n at least 1, -w and -c not negative")
    sizes = ends[:1]
    while sizes[-1] * args.stepfactor <= ends[1]:
        sizes.append(sizes[-1] * args.stepfactor)
    return sizes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nccl-tests' flags, with its defaults, and --device."""
    add = parser.add_argument
    add("-b", "--minbytes", default="32M", help="smallest size (32M)")
    add("-e", "--maxbytes", default="32M", help="largest size (32M)")
    add("-f", "--stepfactor", type=int, default=2, help="from size to size (2)")
    add("-w", "--warmup_iters", "--warmup", type=int, default=5, help="calls before them (5)")
    add("-c", "--check", type=int, default=1, help="calls checked (1), 0 for none")
    add("-d", "--datatype", default="float", help="such as float16 (float)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=default, help=f"({default})")


@contextmanager
def started(
    parser: argparse.ArgumentParser, kind: str = "cpu"
) -> Iterator[tuple[collectives.Group, torch.device]]:
    """Yield the group of all ranks and this rank's device; exit by the parser without ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        module = parser.prog.split()[-1]
        parser.error(f"needs ranks: start with torchrun --nproc-per-node 2 -m {module}")
    device = torch.device(kind)
    if kind == "cuda":
        # Before init, which reads each rank's current GPU.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    group = collectives.init()
    try:
        yield group, device
    finally:
        collectives.shutdown()


def run(group: Any, device: torch.device, args: Any, say: Callable[[str], object]) -> int:
    """Measure all combinations and print a table by `say`; return the number of wrong elements."""
    say(
        f"# all_reduce: {group.size} ranks, {group.num_nodes} hosts, {group.transport!r}, "
        f"{device.type}, torch {torch.__version__}"
    )
    ops, names, total, busbws = args.op.split(","), args.algorithm.split(","), 0, []
    longest = (max(map(len, [*each, "algorithm"])) for each in (ops, names))
    widths = (12, 12, 9, *longest, 10, 7, 7, 7)

    def table_row(first: str, *cells: object) -> None:
        texts = (f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
        say(first + " ".join(texts))

    titles = ("size", "count", "type", "redop", "algorithm", "time", "algbw", "busbw", "#wrong")
    table_row("#", *titles)
    table_row("#", "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")
    itemsize = DTYPES[args.datatype].itemsize
    for size, op, name in product(sizes_of(args), ops, names):
        count = size // itemsize
        seconds, wrong = _measure(group, device, name, op, count, args)
        both = bandwidths(count * itemsize, seconds, group.size)
        total += wrong or 0
        busbws.append(both[1])
        figures = f"{seconds * 1e6:.1f}", *(f"{each:.2f}" for each in both)
        of_call = count * itemsize, count, args.datatype, op, name
        table_row(" ", *of_call, *figures, "N/A" if wrong is None else wrong)
    say(f"# Wrong elements: {total} {'FAILED' if total else 'OK'}")
    say(f"# Avg bus bandwidth: {sum(busbws) / len(busbws):.4g}")
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Run on every rank, or start ranks; rank 0 prints. Return 1 if elements were wrong."""
    parser = argparse.ArgumentParser(prog="python -m collectives.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add_flags(parser)
    parser.add_argument("-n", "--iters", type=int, default=20, help="calls timed (20)")
    parser.add_argument("-o", "--op", default="sum", help=f"{', '.join(_OPS)} or MODULE:NAME (sum)")
    parser.add_argument("-a", "--algorithm", default="auto", help="specifications (auto)")
    parser.add_argument("--ranks", type=int, help="start so many on this host")
    args = parser.parse_args(argv)
    try:
        _check(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if args.ranks is not None:
        return _start(args.ranks, sys.argv[1:] if argv is None else argv)
    with started(parser, args.device) as (group, device):
        try:
            for op, name in product(args.op.split(","), args.algorithm.split(",")):
                group.check_algorithm(name, _operator_of(op))
            say = print if group.rank == 0 else lambda text: None
            return int(run(group, device, args, say) > 0)
        except ValueError as error:
            # All ranks raise the same error; print it once.
            if group.rank == 0:
                print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2


def _check(args: argparse.Namespace) -> None:
    """Check the flags without starting ranks, and replace the dtype's name by torch's."""
    args.datatype = dtype_of(args.datatype)
    sizes_of(args)
    for op in args.op.split(","):
        _operator_of(op).check(DTYPES[args.datatype])
        if op == "avg" and not DTYPES[args.datatype].is_floating_point:
            raise ValueError("-o avg needs a floating -d: averages of integers are rounded")
    for name in args.algorithm.split(","):
        parse_all_reduce_spec(name)
    launched = "WORLD_SIZE" in os.environ
    if args.ranks is None and not launched:
        raise ValueError("needs ranks: --ranks 2 starts them on this host, or use torchrun")
    if args.ranks is not None and (args.ranks < 2 or launched):
        raise ValueError(
            f"--ranks must be at least 2, and left out under a launcher, got {args.ranks}"
        )


def _start(ranks: int, argv: Sequence[str]) -> int:
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--ranks")
    _, flags = only.parse_known_args(argv)
    # Without a number torchrun uses 1, with a long warning.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", *launch, "-m", "collectives.bench", *flags]
    return subprocess.call(command, env={**threads, **os.environ})
