"""Code run by a Python of its own that lacks parts, and what it reports."""

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
from tests.packaging.absent import hide

hide(*{hidden!r})

def said(function, *args, **options):
    try:
        return ["returned", repr(function(*args, **options))]
    except Exception as error:
        return [type(error).__name__, str(error)]

report = {{}}
"""

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
report["alone"] = [adasum.size(), parameter.tolist()]
adasum.shutdown()
"""


def run(code: str, *hidden: str) -> dict[str, Any]:
    """What `code` put into `report`, run by a Python that cannot find `hidden`."""
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


def one_line(said: list[str], error: str, *words: str) -> None:
    assert said[0] == error, said
    assert "\n" not in said[1]
    for word in words:
        assert word in said[1], said


def check_work(report: dict[str, Any]) -> None:
    assert report["kernels"] == [1.0, 1.0]
    assert report["threads"] == [[1.0] * 5] * 3
    assert report["alone"] == [1, [0.0] * 3]
