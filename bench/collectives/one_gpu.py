"""Adasum beside NCCL's own sum, between ranks that are threads of one process on one GPU.

    python -m bench.collectives.one_gpu                     # 64 MiB between two ranks
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 LD_PRELOAD=.../libnccl.so.2 python -m ...

Processes would take turns on a GPU; threads share it, as processes do under MPS. It needs NCCL 2.30
or newer, through cupy. Each rank has its own stream and communicator. A call's time is from a
barrier to the end of the last rank's work; contenders take turns. #wrong counts elements of all
ranks that differ from float64 by more than roundings explain. "vs torch" is NCCL's sum over each.
Rows of requests are those algorithms', made once and started each time: launched as CUDA graphs.
What is shared goes as by default, in one launch a rank: threads need no symmetric memory of torch's
to reach each other's. bench.collectives.node times the kernels alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import collectives
from adasum import Adasum
from adasum.check.checks import NO_GPU
from bench.collectives import node
from bench.collectives.ranks import in_turns, make_parser, write
from bench.collectives.row import Row, header, line
from collectives.schedules.spec import parse_general_int
from collectives.schedules.topology import Topology
from collectives.transport import NcclTransport, ThreadWorld, Transport
from collectives.transport.nccl import node_memory
from collectives.transport.nccl.cupy_backend import CupyBackend

SECONDS = 60.0
NCCL = "nccl"
# What follows an algorithm's name where it is a request's.
REQUEST = ", request"
# In one launch, and what follows it.
SHARED = "shared"
# By algorithm: NCCL's own sum, ours, Adasum by levels and by one exchange; the same as requests.
_CALLS = {
    "rechd": collectives.Sum,
    "vhdd": Adasum,
    "direct": Adasum,
    f"{SHARED}, sum": collectives.Sum,
    f"{SHARED}, adasum": Adasum,
}
CONTENDERS: dict[str, collectives.Reducer] = {
    NCCL: collectives.Sum,
    **_CALLS,
    **{f"{name}{REQUEST}": op for name, op in _CALLS.items()},
}
_WIDTH = max(map(len, CONTENDERS))
# Iterations that are not counted: a request's third start is its graph's first launch.
WARM_UP = 3


class Rank:
    """One thread's part: its group, its vector of `numel` elements, a barrier with the others."""

    def __init__(
        self, transport: Transport, meet: threading.Barrier, numel: int, device: torch.device
    ) -> None:
        rank, size = transport.rank, transport.size
        own = {"local_rank": rank, "local_size": size, "topology": Topology(size, size)}
        self.group = collectives.Group(transport, timeout=SECONDS, **own)
        self._meet, self._device = meet, device
        # float32, known to all.
        seeds = [torch.Generator(device).manual_seed(each) for each in range(size)]
        self._terms = [torch.randn(numel, generator=seed, device=device) for seed in seeds]
        self._mine = self._terms[rank]
        self._buffer = torch.empty_like(self._mine)
        self._requests: dict[str, collectives.Request[torch.Tensor]] = {}

    def wrong(self, algorithm: str) -> int:
        """Return how many elements a call gets wrong here."""
        self._prepared(algorithm)()
        self._wait()
        return node.count_wrong(self._buffer, self._terms, CONTENDERS[algorithm] is Adasum)

    def seconds(self, algorithms: Sequence[str], iterations: int) -> dict[str, list[float]]:
        """Return this rank's seconds of each contender, by iteration."""
        barrier, turns = partial(self._meet.wait, SECONDS), WARM_UP + iterations
        taken = in_turns(algorithms, self._prepared, turns, self._wait, barrier=barrier)
        return {name: values[WARM_UP:] for name, values in taken.items()}

    def _prepared(self, name: str) -> Callable[[], object]:
        self._buffer.copy_(self._mine)
        algorithm, op = name.removesuffix(REQUEST), CONTENDERS[name]
        algorithm = "auto" if algorithm.startswith(SHARED) else algorithm
        if not name.endswith(REQUEST):
            return lambda: self.group.all_reduce(self._buffer, op, algorithm=algorithm)
        if name not in self._requests:
            made = self.group.all_reduce_init(self._buffer, op, algorithm=algorithm)
            self._requests[name] = made
        request = self._requests[name]

        def start() -> torch.Tensor:
            request.start()
            return request.wait()

        return start

    def _wait(self) -> None:
        # Of the own stream: the other ranks' work is not this rank's.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


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
    if device.type == "cuda":
        node.rows(ranks, numel, 1, device)

    def main(rank: int) -> tuple[dict[str, int], dict[str, list[float]]]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        own = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(own) if own is not None else nullcontext():
            warm = Rank(world.transport(rank), meet, numel, device)
            for name in algorithms:
                if name != NCCL and not name.startswith(SHARED):
                    warm.wrong(name)
            meet.wait(SECONDS)
            warm.group.close()
            me = Rank(make(rank), meet, numel, device)
            try:
                wrong = {name: me.wrong(name) for name in algorithms}
                return wrong, me.seconds(algorithms, iterations)
            except BaseException:
                meet.abort()
                raise
            finally:
                me.group.close()

    with futures.ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(main, range(ranks)))
    rows = []
    for name in algorithms:
        slowest = [max(each) for each in zip(*(taken[name] for _, taken in found), strict=True)]
        wrong = sum(wrong[name] for wrong, _ in found)
        redop = "adasum" if CONTENDERS[name] is Adasum else "sum"
        rows.append(Row(numel, torch.float32, redop, name, ranks, slowest, wrong))
    return rows


def allocate(
    nbytes: int,
    pads: int,
    group: object,
    device: torch.device,
    gather: Callable[[Any], list[Any]],
    node_ranks: Sequence[int],
) -> tuple[torch.Tensor, list[int]]:
    """Do as `node_memory.allocate` among threads, which have one address for each memory."""
    whole = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return whole, gather(whole.data_ptr())


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where an element was wrong, 2 without a GPU."""
    parser = make_parser("one_gpu", __doc__, iters=20)
    parser.add_argument("--ranks", type=int, choices=[2, 4, 8], default=2, help="threads (2)")
    parser.add_argument("-b", "--bytes", default="64M", help="of a rank's vector (64M)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"bench.collectives.one_gpu: {NO_GPU}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    numel = parse_general_int(args.bytes.upper()) // 4
    world = ThreadWorld(args.ranks)

    def over_nccl(rank: int) -> Transport:
        transport = NcclTransport(world.transport(rank), CupyBackend(device), timeout=SECONDS)
        # All that memory of a node asks of one, where `allocate` does without.
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: args.ranks)
        transport.process_group = group
        return transport

    with mock.patch.object(node_memory, "allocate", allocate):
        rows = run(args.ranks, numel, args.iters, device, over_nccl)
    print(*header(_WIDTH), *(line(row, rows[0], _WIDTH) for row in rows), sep="\n", flush=True)
    results = [{**row.record(), "ranks": row.ranks, "median": row.median} for row in rows]
    write(args.output_file, {"device": torch.cuda.get_device_name(device), "results": results})
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
