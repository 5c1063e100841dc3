"""Run code in a Python process that cannot import some packages, and return what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

START = """
import json
from tests.packaging.hidden_packages import hide

hide(*{hidden!r})

def outcome(function, *args, **options):
    try:
        return ["returned", repr(function(*args, **options))]
    except Exception as error:
        return [type(error).__name__, str(error)]

report = {{}}
"""

# What must work on every machine: kernels, ranks as threads, and training on one rank.
USE = """
a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
report["kernels"] = kernels.adasum(a, b).tolist()
report["threads"] = [
    tensor.tolist()
    for tensor in collectives.run_threads(
        3, lambda group: group.all_reduce(torch.ones(5), adasum.Adasum, algorithm="rechd")
    )
]
adasum.init()
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = adasum.DistributedOptimizer(
    torch.optim.SGD([parameter], lr=1.0), named_parameters=[("p", parameter)], op=adasum.Adasum
)
parameter.sum().backward()
optimizer.step()
report["one rank"] = [adasum.size(), parameter.tolist()]
adasum.shutdown()
"""


def run(code: str, *hidden: str) -> dict[str, Any]:
    """Run `code` where `hidden` cannot be imported and return its dictionary `report`."""
    whole = START.format(hidden=hidden) + code + "\nprint(json.dumps(report))\n"
    done = subprocess.run(
        [sys.executable, "-c", whole],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if name not in TORCHRUN},
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def assert_error(outcome: list[str], error: str, *parts: str) -> None:
    """Check that `error` was raised, with one line of text that contains every part."""
    assert outcome[0] == error, outcome
    assert "\n" not in outcome[1]
    for part in parts:
        assert part in outcome[1], outcome


def assert_use_worked(report: dict[str, Any]) -> None:
    """Check what `USE` has reported."""
    assert report["kernels"] == [1.0, 1.0]
    assert report["threads"] == [[1.0] * 5] * 3
    assert report["one rank"] == [1, [0.0] * 3]
