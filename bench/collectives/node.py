"""A node's sums and Adasum, one launch a rank; ranks are streams of one process on one GPU.

    python -m bench.collectives.node                      # 2, 4 and 8 ranks; 64 KiB, 25 and 64 MiB

It needs no NCCL and no memory that processes share, and no figure says what NVLink does. A time is
of all ranks together, from a point before the first launch to the end of the last one, the host's
launches among it. #wrong counts elements of all ranks that differ from float64 by more than
roundings explain. "vs torch" is a copy of every rank's vector over each. Calls and requests are
timed by bench.collectives.one_gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, cuda

from adasum import Adasum
from adasum.check.checks import NO_GPU, expected
from bench.collectives.ranks import make_parser, write
from bench.collectives.row import Row, header, line
from collectives import Average
from collectives.schedules.schedule import split_bounds
from collectives.schedules.spec import parse_general_int
from kernels.gpu.node_kernels import Node, pad_bytes
from kernels.gpu.signals import MAX_PROGRAMS

SECONDS = 5.0
WARM_UP = 3
COPY = "copy"


class Contender(NamedTuple):
    """segments: of Adasum, 0 of an average; equal: whether all ranks have one vector."""

    segments: int
    equal: bool = False


# Equal vectors cancel beyond 2**30: they take double-double sums.
CONTENDERS = {
    "average": Contender(0),
    "adasum": Contender(1),
    "adasum, 16 segments": Contender(16),
    "adasum of equals": Contender(1, equal=True),
}
_WIDTH = max(map(len, CONTENDERS))
# Programs of an average and of Adasum that a multiprocessor holds, by their registers.
_RESIDENT = 4, 2


def count_wrong(got: Tensor, terms: Sequence[Tensor], segments: int, factor: float = 1.0) -> int:
    """Return how many elements are further from float64 than roundings explain.

    segments: of Adasum, into which the terms are cut; 0 for `factor` times a sum.
    """
    wrong = 0
    for low, high in pairwise(split_bounds(got.numel(), max(1, segments))):
        parts = [term[low:high] for term in terms]
        want = expected(parts, segments > 0) * (1.0 if segments else factor)
        sizes = torch.stack(parts).double().abs().sum(0)
        # A rounding or two a level and element; a coefficient of Adasum is at most 1.5 here.
        allowed = 8 * len(parts) * torch.finfo(got.dtype).eps * sizes
        wrong += int(((got[low:high].double() - want).abs() > allowed).sum())
    return wrong


class Ranks:
    """All ranks' vectors of float32, the memory in which they are reduced, and streams."""

    def __init__(self, ranks: int, numel: int, device: torch.device) -> None:
        made = torch.Generator(device).manual_seed(ranks)
        self._vectors = [torch.randn(numel, generator=made, device=device) for _ in range(ranks)]
        self._held = [torch.empty_like(x) for x in self._vectors]
        self._pads = [
            torch.zeros(pad_bytes(ranks), dtype=torch.uint8, device=device) for _ in range(ranks)
        ]
        places = [[one.data_ptr() for one in some] for some in (self._held, self._pads)]
        self._nodes = [Node(rank, *places, device, SECONDS) for rank in range(ranks)]
        self._streams = [cuda.Stream(device) for _ in range(ranks)]

    def row(self, name: str, iterations: int) -> Row:
        """Time a contender, or COPY; its last results are looked at."""
        which = CONTENDERS.get(name, Contender(0))
        size, numel = len(self._nodes), self._vectors[0].numel()
        given = self._vectors[:1] * size if which.equal else self._vectors
        launches = self._launches(name, which)
        taken = []
        for _ in range(WARM_UP + iterations):
            for held, x in zip(self._held, given, strict=True):
                held.copy_(x)
            taken.append(self._seconds(launches))
        wrong = None
        if name != COPY:
            for node in self._nodes:
                node.check()
            wrong = sum(count_wrong(x, given, which.segments, 1 / size) for x in self._held)
        op = "adasum" if which.segments else "avg"
        return Row(numel, torch.float32, op, name, size, taken[WARM_UP:], wrong)

    def _launches(self, name: str, which: Contender) -> list[Callable[[], object]]:
        if name == COPY:
            pairs = zip(self._held, self._vectors, strict=True)
            return [lambda held=held, x=x: held.copy_(x) for held, x in pairs]
        op = Adasum if which.segments else Average
        numel = self._vectors[0].numel()
        cuts = split_bounds(numel, which.segments) if which.segments else None
        pairs = zip(self._nodes, self._held, strict=True)
        return [op.bind_on_node(node, x, 0, cuts) for node, x in pairs]

    def _seconds(self, launches: Sequence[Callable[[], object]]) -> float:
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for stream, launch in zip(self._streams, launches, strict=True):
            stream.wait_event(start)
            with cuda.stream(stream):
                launch()
        for stream in self._streams:
            cuda.current_stream().wait_stream(stream)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def rows(ranks: int, numel: int, iterations: int, device: torch.device) -> list[Row]:
    """Return a row for the copy and each contender whose programs this GPU holds together."""
    held = cuda.get_device_properties(device).multi_processor_count
    names = [
        name
        for name, which in CONTENDERS.items()
        if ranks * MAX_PROGRAMS <= held * _RESIDENT[which.segments > 0]
    ]
    node = Ranks(ranks, numel, device)
    return [node.row(name, iterations) for name in [COPY, *names]]


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where an element was wrong, 2 without a GPU."""
    parser = make_parser("node", __doc__, iters=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(2 4 8)")
    parser.add_argument("-b", "--bytes", nargs="+", default=["64K", "25M", "64M"], help="a rank's")
    args = parser.parse_args(argv)
    if not cuda.is_available():
        print(f"bench.collectives.node: {NO_GPU}", file=sys.stderr)
        return 2
    device, found = torch.device("cuda", cuda.current_device()), list[Row]()
    print(*header(_WIDTH), sep="\n")
    for ranks in args.ranks:
        for text in args.bytes:
            some = rows(ranks, parse_general_int(text.upper()) // 4, args.iters, device)
            print(*(line(row, some[0], _WIDTH) for row in some), sep="\n", flush=True)
            found += some
            results = [{**row.record(), "ranks": row.ranks, "median": row.median} for row in found]
            # What there is if it is ended before its end.
            write(args.output_file, {"device": cuda.get_device_name(device), "results": results})
    return int(any(row.wrong for row in found))


if __name__ == "__main__":
    sys.exit(main())
