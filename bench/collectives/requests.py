"""What a persistent request costs from start to wait, beside the same all-reduce called directly.

    torchrun --nproc-per-node 2 -m bench.collectives.requests

Times are microseconds a call on the slowest rank: the median over blocks of calls, and the spread
from the first to the third quartile. Blocks of the two ways take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import collectives
from bench.collectives.ranks import OPS, in_turns, make_parser, slowest, write
from bench.kernels.timing import Times
from collectives.tools.bench import started

SIZES = (4 * 1024, 1024 * 1024)


def main() -> None:
    """Print a row for each operator, size and way."""
    parser = make_parser("requests", __doc__)
    parser.add_argument("--blocks", type=int, default=30, help="blocks of calls of each way")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a block, about")
    args = parser.parse_args()
    found = []
    # Ranks share the processors: a rank with several threads would take the others'.
    torch.set_num_threads(1)
    with started(parser) as (group, _):
        for op in ("sum", "adasum"):
            for nbytes in SIZES:
                for way, taken in measure(group, op, nbytes, args.blocks, args.seconds).items():
                    times = Times.of([value * 1e6 for value in taken])
                    row = f"{group.size} ranks, {op:6} {nbytes:8} B, {way:8} {times.median:8.1f} us"
                    found.append(f"{row} ({times.low:.1f} to {times.high:.1f})")
                    if group.rank == 0:
                        print(found[-1], flush=True)
        if group.rank == 0:
            write(args.output_file, found)


def measure(
    group: collectives.Group, op: str, nbytes: int, blocks: int, seconds: float
) -> dict[str, list[float]]:
    """Time blocks of calls of each way, in turn; return seconds a call by way."""
    tensor = torch.randn(nbytes // 4)
    request = group.all_reduce_init(tensor, OPS[op])

    ways = {
        "direct": lambda: group.all_reduce(tensor, OPS[op]),
        "request": lambda: (request.start(), request.wait()),
    }

    def prepared(way: str) -> Callable[[], object]:
        tensor.normal_()
        return ways[way]

    once = max(slowest(in_turns(["direct"], prepared, 5))["direct"])
    calls = dict.fromkeys(ways, max(1, int(seconds / once)))
    return slowest(in_turns(ways, prepared, blocks, calls=calls))


if __name__ == "__main__":
    main()
