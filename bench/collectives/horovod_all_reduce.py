"""Horovod's all-reduce beside ours on one host's processors, in turns, timed alike.

    python -m bench.collectives.horovod_all_reduce --ranks 2 --horovod-python PATH -J out.json
    mpirun -n 2 PATH -m bench.collectives.horovod_all_reduce -b 4K -e 64M -f 4 -o adasum

The first runs in turns `mpirun` with Horovod's interpreter (the second) and `torchrun -m
bench.collectives.all_reduce` with this one: Horovod's threads spin all the time, so the two cannot
share processes. Ranks of Horovod time hvd.allreduce_, in place, just as
bench.collectives.all_reduce times ours; a wrong result ends either. A turn's time is the median
over its iterations of the slowest rank's; the table has the median of the turns, and the span of
their ratios. Other flags go to bench.collectives.all_reduce on both sides, and HOROVOD_* in the
environment to Horovod; bench/NOTES.md says how it is built.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
from adasum import Adasum
from bench.collectives import all_reduce, ranks
from bench.processes import in_turns
from bench.tables import table
from collectives.schedules.topology import Topology

# Not bound, as in Horovod's documentation. Two threads of a rank wait by spinning, so they must
# yield even where each rank has a processor.
MPIRUN = "mpirun --oversubscribe --bind-to none --map-by slot --mca mpi_yield_when_idle 1"
DEFAULTS = "-b 4K -e 64M -f 4 -n 10 -o sum,adasum --device cpu"


class Horovod:
    """What bench.collectives.all_reduce uses of a collectives.Group, over Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd, self.transport = hvd, self
        self.rank, self.size = hvd.rank(), hvd.size()
        self.topology = Topology(self.size, self.size)
        # torch's gloo, for barriers and the expected result, listens at rank 0's port.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = hvd.broadcast_object(store.port, root_rank=0)
        if self.rank:
            store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def all_reduce(self, tensor: Tensor, op: Any, *, algorithm: str) -> None:
        """Reduce in place; `algorithm` only tells what is expected, Horovod has one."""
        hvd = self._hvd
        ops = {collectives.Sum: hvd.Sum, collectives.Average: hvd.Average, Adasum: hvd.Adasum}
        # Horovod negotiates a name that it has seen before by a bit instead of a message.
        hvd.allreduce_(tensor, op=ops[op], name=f"{ops[op]} {tensor.numel()}")


@dataclass(frozen=True)
class Line:
    """One size and operator: microseconds by turn of Horovod, ours, and torch's sum over gloo.

    ratio: Horovod's time over ours.
    """

    size: int
    redop: str
    horovod: list[float]
    ours: list[float]
    torch: list[float]
    ratio: float

    def cells(self) -> list[str]:
        """Return medians, their ratio, and the span of the turns' ratios."""
        ratios = [theirs / mine for theirs, mine in zip(self.horovod, self.ours, strict=True)]
        times = [f"{median(us):.1f}" for us in (self.horovod, self.ours, self.torch)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        return [str(self.size), self.redop, *times, f"{self.ratio:.2f}", spread]


def lines(turns: Sequence[Mapping[str, Any]]) -> list[Line]:
    """turns: {"horovod": ..., "ours": ...}, each what all_reduce's -J writes for one algorithm."""

    # Rows come in pairs: torch's, the algorithm's.
    def times(name: str, place: int) -> list[float]:
        return [turn[name]["results"][place]["time"] for turn in turns]

    found = []
    for i, row in list(enumerate(turns[0]["ours"]["results"]))[1::2]:
        theirs, mine, torchs = times("horovod", i), times("ours", i), times("ours", i - 1)
        ratio = median(theirs) / median(mine)
        found.append(Line(row["size"], row["redop"], theirs, mine, torchs, ratio))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where a run failed or an element was wrong, 2 for bad options."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return _rank(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    flags = [*DEFAULTS.split(), *rest]
    try:
        _check(args, flags)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    ranks_of, module = str(args.ranks), "bench.collectives"
    theirs = [*shlex.split(args.mpirun), "-n", ranks_of, args.horovod_python]
    theirs += ["-m", f"{module}.horovod_all_reduce", *flags]
    ours = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ours += [ranks_of, "-m", f"{module}.all_reduce", "-a", args.algorithm, *flags]
    commands = {"horovod": theirs, "ours": ours}
    variables = {name: text for name, text in os.environ.items() if name.startswith("HOROVOD_")}
    print(f"# {args.ranks} ranks, {variables or 'no HOROVOD_*'}, {args.mpirun}", flush=True)
    turns: list[dict[str, Any]] = [{} for _ in range(args.turns)]
    for turn, name, result in in_turns(commands, args.turns, limit=args.limit):
        turns[turn][name] = result
        load = result["environment"]["load"]
        print(f"# turn {turn + 1}, {name}: load {load:.1f}", flush=True)
    found = lines(turns)
    header = ["bytes", "op", "Horovod us", "ours us", "torch sum us", "Horovod/ours", "by turn"]
    print(*table(header, [line.cells() for line in found]), sep="\n")
    slower = [f"{line.redop} at {line.size} ({line.ratio:.2f})" for line in found if line.ratio < 1]
    print(f"# Ours is slower: {', '.join(slower)}" if slower else "# Ours is never slower")
    record = {"commands": commands, "variables": variables, "turns": turns}
    record["lines"] = [asdict(line) for line in found]
    ranks.write(args.output_file, record)
    return 0


def _rank(argv: Sequence[str] | None) -> int:
    """Run one of mpirun's ranks."""
    torch.set_num_threads(1)
    args = all_reduce.make_parser().parse_args(argv)
    # Horovod's tree of ranks in Adasum is that of recursive halving.
    args.algorithm = "vhdd"
    sizes, ops = all_reduce.sizes_and_algorithms(args)
    code = all_reduce.run(args, Horovod(), torch.device("cpu"), sizes, ops)
    dist.destroy_process_group()
    return code


def _check(args: Any, flags: Sequence[str]) -> None:
    """Raise ValueError for what one side would refuse, OSError for no such interpreter."""
    shared = all_reduce.make_parser().parse_args([*flags, "-a", args.algorithm])
    _, ops = all_reduce.sizes_and_algorithms(shared)
    if args.ranks < 2 or ("adasum" in ops and args.ranks & (args.ranks - 1)):
        raise ValueError(f"--ranks must be 2, 4, 8, ... for Horovod's Adasum, got {args.ranks}")
    if "," in args.algorithm or shared.model or shared.device != "cpu" or args.turns < 1:
        raise ValueError("give one algorithm in -a, 1 or more --turns; no --model, no other device")
    probe = [args.horovod_python, "-c", "import horovod.torch as hvd; assert hvd.mpi_built()"]
    if subprocess.run(probe).returncode:
        raise ValueError("--horovod-python must be an interpreter with Horovod over MPI")


def _parser() -> argparse.ArgumentParser:
    parser = ranks.make_parser("horovod_all_reduce", __doc__)
    parser.epilog = f"Defaults: {DEFAULTS}"
    parser.add_argument("--ranks", type=int, default=2, help="of each side (2)")
    parser.add_argument("--turns", type=int, default=3, help="of each side (3)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a turn (600)")
    parser.add_argument("--horovod-python", default="python", help="interpreter with Horovod")
    parser.add_argument("--mpirun", default=MPIRUN, help=f"({MPIRUN})")
    parser.add_argument("-a", "--algorithm", default="auto", help="ours (auto)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
