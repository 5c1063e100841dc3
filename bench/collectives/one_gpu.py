"""Adasum beside NCCL's own sum, between ranks that are threads of one process on one GPU.

    python -m bench.collectives.one_gpu                     # 64 MiB between two ranks
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 LD_PRELOAD=.../libnccl.so.2 python -m ...

Processes would take turns on a GPU; threads share it, as processes do under MPS. It needs NCCL 2.30
or newer, through cupy. Each rank has its own stream and communicator. A call's time is from a
barrier to the end of the last rank's work; contenders take turns. #wrong counts elements of all
ranks that differ from float64 by more than roundings explain. "vs torch" is NCCL's sum over each.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
import kernels
from adasum import Adasum
from bench.collectives.row import Row, header, line
from collectives.schedules.spec import parse_general_int
from collectives.schedules.topology import Topology
from collectives.transport import NcclTransport, ThreadWorld, Transport
from collectives.transport.nccl.cupy_backend import CupyBackend

SECONDS = 60.0
NCCL = "nccl"
# By algorithm: NCCL's own sum, ours, and Adasum as it is by default.
CONTENDERS: dict[str, collectives.Reducer] = {
    NCCL: collectives.Sum,
    "rechd": collectives.Sum,
    "vhdd": Adasum,
}
Call = Callable[[], object]


def inputs(ranks: int, numel: int) -> list[Tensor]:
    """Return each rank's vector, float32 on the CPU, known to all."""
    return [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]


def expected(terms: Sequence[Tensor], op: collectives.Reducer) -> Tensor:
    """Return the answer in float64: adjacent ranks, then adjacent pairs."""
    level = [each.double() for each in terms]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [kernels.adasum_reference(a, b) if op is Adasum else a + b for a, b in pairs]
    return level[0]


class Rank:
    """One thread's part: its group, its buffer, and a barrier with the others.

    Args:
        transport: Its own.
        meet: All ranks' barrier.
        numel: Elements of its vector.
        device: Where that lies.
    """

    def __init__(
        self, transport: Transport, meet: threading.Barrier, numel: int, device: torch.device
    ) -> None:
        size = transport.size
        topology = Topology(size, size)
        self._group = collectives.Group(
            transport,
            timeout=SECONDS,
            local_rank=transport.rank,
            local_size=size,
            topology=topology,
        )
        self._meet, self._device = meet, device
        self._terms = inputs(size, numel)
        self._mine = self._terms[transport.rank].to(device)
        self._buffer = torch.empty_like(self._mine)

    def wrong(self, algorithm: str) -> int:
        """Return how many elements a call gets wrong here."""
        self._buffer.copy_(self._mine)
        self._call(algorithm)
        self._wait()
        op = CONTENDERS[algorithm]
        want = expected(self._terms, op)
        sizes = torch.stack(self._terms).double().abs().sum(0)
        # A rounding or two a level and element; a coefficient of Adasum is at most 1.5 here.
        allowed = 8 * len(self._terms) * torch.finfo(torch.float32).eps * sizes
        return int(((self._buffer.cpu().double() - want).abs() <= allowed).logical_not().sum())

    def seconds(self, algorithm: str) -> float:
        """Return the seconds of one call, from a barrier on."""
        self._buffer.copy_(self._mine)
        self._wait()
        self._meet.wait(SECONDS)
        begin = time.perf_counter()
        self._call(algorithm)
        self._wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the group, and with it the transport."""
        self._group.close()

    def _call(self, algorithm: str) -> None:
        self._group.all_reduce(self._buffer, CONTENDERS[algorithm], algorithm=algorithm)

    def _wait(self) -> None:
        # Of the own stream: the other ranks' work is not this rank's.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def over_nccl(ranks: int, device: torch.device) -> Callable[[int], Transport]:
    """Return what makes a rank's transport, in its thread."""
    world, store = ThreadWorld(ranks), dist.HashStore()

    def make(rank: int) -> Transport:
        return NcclTransport(world.transport(rank), CupyBackend(store, device), timeout=SECONDS)

    return make


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread a stream of its own on the device, if it is a GPU."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def times(
    me: Rank, algorithms: Sequence[str], iterations: int
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Return a rank's wrong elements and its seconds by iteration, of each contender."""
    wrong = {name: me.wrong(name) for name in algorithms}
    taken: dict[str, list[float]] = {name: [] for name in algorithms}
    for done in range(iterations + 2):
        first = done % len(algorithms)
        for name in (*algorithms[first:], *algorithms[:first]):
            taken[name].append(me.seconds(name))
    # The first two warm up.
    return wrong, {name: values[2:] for name, values in taken.items()}


def run(
    ranks: int,
    numel: int,
    iterations: int,
    device: torch.device,
    make: Callable[[int], Transport],
    algorithms: Sequence[str] = tuple(CONTENDERS),
) -> list[Row]:
    """Return a row for each contender, with the slowest rank's seconds by iteration."""
    # To load a kernel or to pin memory may wait for the whole GPU, and so for a rank that waits in
    # NCCL for this one: the first calls go without.
    meet, world = threading.Barrier(ranks), ThreadWorld(ranks)

    def main(rank: int) -> tuple[dict[str, int], dict[str, list[float]]]:
        with own_stream(device):
            warm = Rank(world.transport(rank), meet, numel, device)
            for name in algorithms:
                if name != NCCL:
                    warm.wrong(name)
            meet.wait(SECONDS)
            warm.close()
            me = Rank(make(rank), meet, numel, device)
            try:
                return times(me, algorithms, iterations)
            except BaseException:
                meet.abort()
                raise
            finally:
                me.close()

    with futures.ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(main, range(ranks)))
    return [
        Row(
            size=4 * numel,
            count=numel,
            type="float32",
            redop="adasum" if CONTENDERS[name] is Adasum else "sum",
            algorithm=name,
            ranks=ranks,
            seconds=[max(each) for each in zip(*(taken[name] for _, taken in found), strict=True)],
            wrong=sum(wrong[name] for wrong, _ in found),
        )
        for name in algorithms
    ]


def record(rows: Sequence[Row], device: str) -> dict[str, Any]:
    """Return what is written as JSON."""
    results = [{**row.record(), "ranks": row.ranks, "median": row.median} for row in rows]
    return {"device": device, "torch": torch.__version__, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where an element was wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.collectives.one_gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], default=2, help="threads (2)")
    parser.add_argument("-b", "--bytes", default="64M", help="of a rank's vector (64M)")
    parser.add_argument("-n", "--iters", type=int, default=20, help="iterations (20)")
    parser.add_argument("-J", "--output_file", type=Path, metavar="FILE", help="write JSON, too")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.collectives.one_gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    numel = parse_general_int(args.bytes.upper()) // 4
    rows = run(args.ranks, numel, args.iters, device, over_nccl(args.ranks, device))
    print(*header(9), *(line(row, rows[0], 9) for row in rows), sep="\n", flush=True)
    if args.output_file is not None:
        name = torch.cuda.get_device_name(device)
        args.output_file.write_text(json.dumps(record(rows, name), indent=1) + "\n")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
