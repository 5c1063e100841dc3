"""What a persistent request costs from start to wait, beside the same all-reduce called directly.

    torchrun --nproc-per-node 2 -m bench.collectives.requests

Times are microseconds a call on the slowest rank: the median over blocks of calls, and the spread
from the first to the third quartile. Blocks of the two ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import collectives
from adasum import Adasum
from collectives import Group, Reducer, Sum

OPS: dict[str, Reducer] = {"Sum": Sum, "Adasum": Adasum}
SIZES = (4 * 1024, 1024 * 1024)


def main() -> None:
    """Print a row for each operator, size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=30, help="blocks of calls of each way")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a block, about")
    args = parser.parse_args()
    group = collectives.init()
    # Ranks share the processors: a rank with several threads would take the others'.
    torch.set_num_threads(1)
    for op in OPS:
        for nbytes in SIZES:
            rows = measure(group, op, nbytes, args.blocks, args.seconds)
            for way, times in rows.items() if group.rank == 0 else ():
                low, median, high = statistics.quantiles(times, n=4)
                print(
                    f"{group.size} ranks, {op:6} {nbytes:8} B, {way:8} {median:8.1f} us "
                    f"({low:.1f} to {high:.1f})",
                    flush=True,
                )
    collectives.shutdown()


def measure(
    group: Group, op: str, nbytes: int, blocks: int, seconds: float
) -> dict[str, list[float]]:
    """Time blocks of calls of each way, in turn; return microseconds a call by way."""
    tensor = torch.randn(nbytes // 4)
    ways: dict[str, Callable[[], object]] = {"direct": lambda: group.all_reduce(tensor, OPS[op])}
    if hasattr(group, "all_reduce_init"):
        request = group.all_reduce_init(tensor, OPS[op])

        def start_and_wait() -> None:
            request.start()
            request.wait()

        ways["request"] = start_and_wait
    times: dict[str, list[float]] = {way: [] for way in ways}
    calls = max(1, int(seconds / slowest(group, block(ways["direct"], tensor, 20))))
    for _ in range(blocks):
        for way, call in ways.items():
            group.barrier()
            times[way].append(1e6 * slowest(group, block(call, tensor, calls)))
    return times


def block(call: Callable[[], object], tensor: torch.Tensor, calls: int) -> float:
    """Return the seconds that one of `calls` calls takes."""
    tensor.normal_()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def slowest(group: Group, seconds: float) -> float:
    """Return the slowest rank's time."""
    return float(group.all_gather(torch.tensor([seconds], dtype=torch.float64)).max())


if __name__ == "__main__":
    main()
