"""Imports on a machine without the optional packages, or whose torch has no torch.distributed."""

from __future__ import annotations

import json
from typing import Any

from tests.processes.commands import python

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


def _run(code: str, *hidden: str) -> dict[str, Any]:
    """Run `code` where `hidden` cannot be imported and return its dictionary `report`."""
    whole = START.format(hidden=hidden) + code + "\nprint(json.dumps(report))\n"
    said = python("-c", whole, without=TORCHRUN, OMP_NUM_THREADS="1")
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


def _assert_error(outcome: list[str], error: str, *parts: str) -> None:
    """Check that `error` was raised, with one line of text that contains every part."""
    assert outcome[0] == error, outcome
    assert "\n" not in outcome[1]
    for part in parts:
        assert part in outcome[1], outcome


def _assert_use_worked(report: dict[str, Any]) -> None:
    """Check what `USE` has reported."""
    assert report["kernels"] == [1.0, 1.0]
    assert report["threads"] == [[1.0] * 5] * 3
    assert report["one rank"] == [1, [0.0] * 3]


BARE = """
import sys, threading, types
import torch
before = threading.active_count()
import kernels
assert not any(name.startswith(("collectives", "adasum")) for name in sys.modules)
import collectives
assert "adasum" not in sys.modules
import adasum
frameworks = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
assert not frameworks & {name.partition(".")[0] for name in sys.modules}
report["started"] = {
    "threads": threading.active_count() - before,
    "CUDA": torch.cuda.is_initialized(),
    "process groups": torch.distributed.is_initialized(),
}
from collectives.transport import load_nccl
from kernels.gpu import launcher

report["triton"] = outcome(launcher.on_triton, types.SimpleNamespace(is_cuda=True))
torch.cuda.is_available = lambda: False
report["no GPU"] = outcome(load_nccl)
torch.cuda.is_available = lambda: True
for version in ("12.8", "13.0"):
    torch.version.cuda = version
    report[f"cupy, CUDA {version}"] = outcome(load_nccl)
torch.cuda.is_available = lambda: False
"""


def test_import_without_optional_packages_works_and_using_one_names_it() -> None:
    report = _run(BARE + USE, "cupy", "triton", "nvidia")
    assert report["started"] == {"threads": 0, "CUDA": False, "process groups": False}
    _assert_use_worked(report)
    _assert_error(report["triton"], "ImportError", "pip install 'triton>=")
    _assert_error(report["no GPU"], "RuntimeError", "install a CUDA build of torch")
    for version in ("12.8", "13.0"):
        extra = f'pip install "cupy-cuda{version[:2]}x>=14.2"'
        _assert_error(report[f"cupy, CUDA {version}"], "ImportError", "cupy", extra)


UNDISTRIBUTED = """
import os
from adasum.check import checks
from collectives import Topology, cost

assert not torch.distributed.is_available()
report["spec"] = [str(part) for part in collectives.parse_all_reduce_spec("rd:16k:xring/vhdd")]
report["cost"] = cost.estimate("xring", 2**20, cost.ASSUMED, Topology(16, 8)).seconds
packed, packing = collectives.pack_small_tensors([torch.ones(2), torch.zeros(3)], 64)
report["packed"] = [tensor.tolist() for tensor in packed]
report["built"] = [adasum.gloo_built(), adasum.nccl_built(), adasum.gloo_enabled()]
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
report["init"] = outcome(collectives.init, timeout=5.0)
report["process group"] = outcome(collectives.from_process_group, None)
report["hook"] = outcome(lambda: adasum.HookState().group)
report["FSDP"] = outcome(adasum.register_fsdp_hook, torch.nn.Linear(2, 2), adasum.HookState())
report["check"] = outcome(checks.reduce, "cpu")
"""


def test_torch_without_distributed_works_on_one_process_and_init_names_it() -> None:
    code = "import torch, kernels, collectives, adasum\n" + USE + UNDISTRIBUTED
    report = _run(code, "cupy", "triton", "nvidia", "torch.distributed")
    _assert_use_worked(report)
    assert report["spec"] == ["rd", "xring/vhdd"]
    assert report["cost"] > 0
    assert report["packed"] == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    assert report["built"] == [False, 0, False]
    for name in ("init", "process group", "FSDP", "check"):
        _assert_error(report[name], "RuntimeError", "without torch.distributed", "pip install")
    _assert_error(report["hook"], "RuntimeError", "adasum.init()")
