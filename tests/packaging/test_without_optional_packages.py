"""Imports on a machine without the optional packages, and the errors of what needs them."""

from __future__ import annotations

from tests.packaging.subprocess_without import USE, assert_error, assert_use_worked, run

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
    report = run(BARE + USE, "cupy", "triton", "nvidia")
    assert report["started"] == {"threads": 0, "CUDA": False, "process groups": False}
    assert_use_worked(report)
    assert_error(report["triton"], "ImportError", "pip install 'triton>=")
    assert_error(report["no GPU"], "RuntimeError", "install a CUDA build of torch")
    for version in ("12.8", "13.0"):
        extra = f'pip install "cupy-cuda{version[:2]}x>=14.2"'
        assert_error(report[f"cupy, CUDA {version}"], "ImportError", "cupy", extra)
