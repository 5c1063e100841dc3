"""What a persistent request costs from start to wait, beside the same all-reduce called directly.

    torchrun --nproc-per-node 2 -m bench.collectives.requests

Times are microseconds a call on the slowest rank: the median over blocks of calls, and the spread
from the first to the third quartile. Blocks of the two ways take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import collectives
from bench.collectives.ranks import OPS, in_turns, require_ranks, slowest, started
from bench.kernels.timing import Times

SIZES = (4 * 1024, 1024 * 1024)


def main() -> None:
    """Print a row for each operator, size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=30, help="blocks of calls of each way")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a block, about")
    args = parser.parse_args()
    require_ranks(parser, "bench.collectives.requests")
    # Ranks share the processors: a rank with several threads would take the others'.
    torch.set_num_threads(1)
    with started() as group:
        for op in ("sum", "adasum"):
            for nbytes in SIZES:
                for way, taken in measure(group, op, nbytes, args.blocks, args.seconds).items():
                    times = Times.of([value * 1e6 for value in taken])
                    row = f"{group.size} ranks, {op:6} {nbytes:8} B, {way:8} {times.median:8.1f} us"
                    if group.rank == 0:
                        print(f"{row} ({times.low:.1f} to {times.high:.1f})", flush=True)


def measure(
    group: collectives.Group, op: str, nbytes: int, blocks: int, seconds: float
) -> dict[str, list[float]]:
    """Time blocks of calls of each way, in turn; return seconds a call by way."""
    tensor = torch.randn(nbytes // 4)
    request = group.all_reduce_init(tensor, OPS[op])

    def direct() -> Callable[[], object]:
        tensor.normal_()
        return lambda: group.all_reduce(tensor, OPS[op])

    def start_and_wait() -> None:
        request.start()
        request.wait()

    def persistent() -> Callable[[], object]:
        tensor.normal_()
        return start_and_wait

    ways = {"direct": direct, "request": persistent}
    once = max(slowest(in_turns({"direct": direct}, 5))["direct"])
    calls = dict.fromkeys(ways, max(1, int(seconds / once)))
    return slowest(in_turns(ways, blocks, calls=calls))


if __name__ == "__main__":
    main()
