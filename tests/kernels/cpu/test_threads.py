"""Whose threads the compiled CPU path computes on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels.cpu import dispatch


@pytest.mark.parametrize("shown", [True, False])
def test_it_has_torchs_threads(shown: bool) -> None:
    """One OpenMP in the process: two would put two pools of threads on the same cores.

    As many threads as torch was told, in one of the user's own, too.
    """
    if why_not := dispatch.reason():
        pytest.skip(f"no compiled CPU path: {why_not}")
    # As in torch's wheels for aarch64, whose OpenMP only those see that name it.
    hide = """
import ctypes
whole = ctypes.CDLL
ctypes.CDLL = lambda name, mode=0: whole(name)
import torch
ctypes.CDLL = whole
assert not hasattr(whole(None), "GOMP_parallel")
"""
    code = """
import os, re, threading, time, kernels, torch
def more():
    before = len(os.listdir("/proc/self/task"))
    kernels.scaled_add(a, a, out=a)
    seen.append(len(os.listdir("/proc/self/task")) - before)
a, seen = torch.empty(1 << 20), []
kernels.backend_info().cpu_path
torch.set_num_threads(1)
user = threading.Thread(target=more)
before = len(os.listdir("/proc/self/task"))
user.start()
user.join()
deadline = time.monotonic() + 10.0
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
    time.sleep(0.01)
torch.set_num_threads(3)
more()
print(*seen)
files = {line.split()[-1] for line in open("/proc/self/maps")}
print(*{file for file in files if re.match("lib[gi]?omp", file.split("/")[-1])})
"""
    done = subprocess.run(
        [sys.executable, "-c", code if shown else hide + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if "OpenMP" in torch.__config__.parallel_info():
        seen, runtime = done.stdout.splitlines()
        assert seen == "0 2" and len(runtime.split()) == 1
