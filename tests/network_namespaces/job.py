"""What every rank runs, under torchrun: `-m tests.network_namespaces.job DIRECTORY PLAN`.

PLAN is JSON: {"timeout": seconds, "algorithms": [...], "numel": numel}. Each rank makes the frozen
calls, leaves DIRECTORY/rank<r>.sums of these algorithms, .ready before it starts to wait for the
cut, .cut when that was noticed, and .ended after the shut-down.
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
from collectives import CollectiveError, Group
from tests.processes.conformance import check_frozen_answers

_STATISTICS = Path("/sys/class/net/eth0/statistics")


def _counter(name: str) -> int:
    return int((_STATISTICS / name).read_text())


def run_sum(group: Group, algorithm: str, numel: int) -> int:
    """One all-reduce; the bytes that this rank's host sent over its link meanwhile."""
    group.barrier()
    before = _counter("tx_bytes")
    group.all_reduce(torch.ones(numel), algorithm=algorithm)
    group.barrier()
    return _counter("tx_bytes") - before


def run_until_cut(group: Group, numel: int) -> dict[str, Any]:
    """All-reduce until it fails, at most 100 times; what was said, and when."""
    try:
        for _ in range(100):
            group.all_reduce(torch.ones(numel), algorithm="xring", name="w")
    except CollectiveError as error:
        return {"error": type(error).__name__, "text": str(error), "when": time.monotonic()}
    return {"error": "", "text": "100 calls went through", "when": time.monotonic()}


def main(directory: Path, plan: dict[str, Any]) -> None:
    group = collectives.init(timeout=plan["timeout"])

    def leave(kind: str, value: dict[str, Any]) -> None:
        path = directory / f"rank{group.rank}.{kind}"
        torch.save(value, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    check_frozen_answers(group)
    leave(
        "sums",
        {
            "host": os.uname().nodename,
            "shape": (group.num_nodes, group.local_size),
            "near": sorted({*getattr(group.transport, "near", ())} - {group.rank}),
            "sent": {name: run_sum(group, name, plan["numel"]) for name in plan["algorithms"]},
        },
    )
    leave("ready", {})
    leave("cut", run_until_cut(group, plan["numel"]))
    collectives.shutdown()
    leave("ended", {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
