"""Importing where optional parts are missing, and what using the missing part says."""

from __future__ import annotations

from tests.packaging.machine import USE, check_work, one_line, run

BARE = """
import sys, threading, types
import torch
before = threading.active_count()
import kernels
assert not any(name.startswith(("collectives", "adasum")) for name in sys.modules)
import collectives
assert "adasum" not in sys.modules
import adasum
report["started"] = {
    "threads": threading.active_count() - before,
    "CUDA": torch.cuda.is_initialized(),
    "process groups": torch.distributed.is_initialized(),
}
from collectives.transport import load_nccl
from kernels import _launch

report["triton"] = said(_launch.on_triton, types.SimpleNamespace(is_cuda=True))
torch.cuda.is_available = lambda: False
report["no GPU"] = said(load_nccl)
torch.cuda.is_available = lambda: True
for version in ("12.8", "13.0"):
    torch.version.cuda = version
    report[f"cupy, CUDA {version}"] = said(load_nccl)
torch.cuda.is_available = lambda: False
"""


def test_without_triton_cupy_nvidia_packages_and_gpu() -> None:
    report = run(BARE + USE, "cupy", "triton", "nvidia")
    assert report["started"] == {"threads": 0, "CUDA": False, "process groups": False}
    check_work(report)
    one_line(report["triton"], "ImportError", "pip install 'triton>=")
    one_line(report["no GPU"], "RuntimeError", "install a CUDA build of torch")
    for version in ("12.8", "13.0"):
        extra = f'pip install "adasum[cuda{version[:2]}]"'
        one_line(report[f"cupy, CUDA {version}"], "ImportError", "cupy", extra)
