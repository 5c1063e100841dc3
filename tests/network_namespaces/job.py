"""What every rank runs, under torchrun: `-m tests.network_namespaces.job DIRECTORY PLAN`.

PLAN is JSON: {"timeout": seconds, "cases": [[op, algorithm, numel], ...], "cut": numel}. Each
rank leaves DIRECTORY/rank<r>.cases, .ready before it starts to wait for the cut, .cut when that was
noticed, and .ended after the shut-down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import collectives
from adasum import Adasum
from collectives import CollectiveError, Group, Reducer, Sum

OPS: dict[str, Reducer] = {"Sum": Sum, "Adasum": Adasum}
_STATISTICS = Path("/sys/class/net/eth0/statistics")


def rank_input(rank: int, numel: int) -> torch.Tensor:
    """A rank's input, known to all: normal, float32, 1-D."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator)


def _counter(name: str) -> int:
    return int((_STATISTICS / name).read_text())


def run_case(group: Group, op: str, algorithm: str, numel: int) -> dict[str, Any]:
    """One all-reduce: the answer, and the bytes that crossed this rank's host's link meanwhile."""
    tensor = rank_input(group.rank, numel)
    group.barrier()
    before = _counter("tx_bytes"), _counter("rx_bytes")
    start = time.perf_counter()
    group.all_reduce(tensor, OPS[op], algorithm=algorithm)
    group.barrier()
    seconds = time.perf_counter() - start
    after = _counter("tx_bytes"), _counter("rx_bytes")
    sent, received = (b - a for a, b in zip(before, after, strict=True))
    return {"answer": tensor, "sent": sent, "received": received, "seconds": seconds}


def run_until_cut(group: Group, numel: int) -> dict[str, Any]:
    """All-reduce until it fails, at most 100 times; what was said, and when."""
    tensor = rank_input(group.rank, numel)
    try:
        for _ in range(100):
            group.all_reduce(tensor, algorithm="xring", name="w")
            tensor.mul_(0.5)
    except CollectiveError as error:
        return {"error": type(error).__name__, "text": str(error), "when": time.monotonic()}
    return {"error": "", "text": "100 calls went through", "when": time.monotonic()}


def main(directory: Path, plan: dict[str, Any]) -> None:
    group = collectives.init(timeout=plan["timeout"])

    def leave(kind: str, value: dict[str, Any]) -> None:
        path = directory / f"rank{group.rank}.{kind}"
        torch.save(value, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    leave(
        "cases",
        {
            "host": os.uname().nodename,
            "shape": (group.num_nodes, group.local_size),
            "near": sorted({*getattr(group.transport, "near", ())} - {group.rank}),
            "cases": {" ".join(map(str, case)): run_case(group, *case) for case in plan["cases"]},
        },
    )
    leave("ready", {})
    leave("cut", run_until_cut(group, plan["cut"]))
    collectives.shutdown()
    leave("ended", {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
