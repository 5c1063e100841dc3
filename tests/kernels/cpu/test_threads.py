"""Threads: those that the compiled CPU path computes on, and the user's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import kernels
from kernels.cpu import dispatch, native
from tests.kernels.cases import random
from tests.kernels.cpu.cases import compile_changed, need_compiled

# As in torch's wheels for aarch64, whose OpenMP only those see that name it.
HIDE = """
import ctypes
whole = ctypes.CDLL
ctypes.CDLL = lambda name, mode=0: whole(name)
import torch
ctypes.CDLL = whole
assert not hasattr(whole(None), "GOMP_parallel")
"""
COUNT = """
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


def lines_of(code: str) -> list[str]:
    """Return what another process that runs `code` prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.slow
def test_it_has_torchs_threads(shown: bool) -> None:
    """One OpenMP in the process: two would put two pools of threads on the same cores.

    As many threads as torch is set to, in one of the user's own, too.
    """
    need_compiled()
    seen, runtime = lines_of(COUNT if shown else HIDE + COUNT)
    if "OpenMP" in torch.__config__.parallel_info():
        assert seen == "0 2" and len(runtime.split()) == 1


def test_threads_compute_at_once() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        tensors = [random(40_000, torch.float32, "cpu", 10 * seed + i) for i in range(2)]
        expected, layout = tensors[0] + tensors[1], kernels.layout_of(tensors)
        out, buffer = torch.empty(40_000), torch.empty(layout.numel)
        plan = kernels.plan_sum_n(tensors)
        for _ in range(100):
            out.fill_(torch.nan)
            kernels.sum_n(tensors, out=out)
            kernels.pack(tensors, layout=layout, out=buffer)
            found = [out, plan(), *layout.views(buffer)]
            if not all(map(torch.equal, found, [expected, expected, *tensors])):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("planned", [False, True])
def test_others_go_on_while_c_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    """What takes long gives up the lock that Python's threads share."""
    need_compiled()
    if not shutil.which("gcc"):
        pytest.skip("no gcc on the PATH")
    head = "void scaled_add(const struct task *t)\n{\n"

    def change(name: str, text: str) -> str:
        assert name != "native.c" or head in text
        return text.replace(head, f"int usleep(unsigned);\n{head}usleep(200000);\n")

    library = native.Library(compile_changed(tmp_path, change))
    monkeypatch.setattr(dispatch, "library", lambda: library)
    a, b = (random(1 << 17, torch.float32, "cpu", seed) for seed in (1, 2))
    plan = kernels.plan_scaled_add(a, b, out=a)
    thread = threading.Thread(target=plan if planned else lambda: kernels.scaled_add(a, b, out=a))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    # Had it been kept from them, there would be one or two.
    assert turns > 20
