"""What recognises calls in C: how it comes to be, and what is done without it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels import _recall
from kernels.cpu import build
from tests.kernels.cases import random
from tests.kernels.conftest import forget_calls, recognise_in_python


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a process that has made no call yet, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
    forget_calls(monkeypatch)
    recognise_in_python(monkeypatch)
    monkeypatch.setattr(_recall, "_why_not", None)


def works() -> bool:
    a, b = (random(33, torch.float32, "cpu", seed) for seed in (1, 2))
    return all(torch.equal(kernels.sum_n([a, b]), a + b) for _ in range(4))


@pytest.mark.usefixtures("unloaded")
def test_it_is_loaded_when_a_call_comes_again() -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    a, b = torch.ones(3), torch.ones(3)
    kernels.sum_n([a, b])
    assert _recall.recognise is _recall.not_known
    kernels.sum_n([a, b])
    assert _recall.recognise is not _recall.not_known
    assert kernels.calls_recognised_by() == "C"


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("headers", "Python: .* failed: .*Python.h"),
        ("choice", "Python: ADASUM_CPU_KERNELS=torch"),
        ("system", "Python: compiled for CPython on Linux"),
        ("threads", "Python: what is known is kept by one thread at a time"),
        ("compiler", "Python: .*is not on the PATH"),
        ("exchange", "Python: .*no dlpack exchange API of version 1"),
    ],
)
def test_python_takes_over(what: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    elif what == "choice":
        monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
    elif what == "system":
        monkeypatch.setattr(_recall.platform, "system", lambda: "Darwin")
    elif what == "threads":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda _: 1)
    elif what == "compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    else:
        newer = _recall.built

        def without(*args: Any) -> Any:
            *most, load = args
            del load
            return newer(*most, refuse)

        def refuse(_: Path) -> Any:
            raise ValueError("torch has no dlpack exchange API of version 1")

        monkeypatch.setattr(_recall, "built", without)
    assert works()
    assert re.match(words, kernels.calls_recognised_by()), kernels.calls_recognised_by()
    assert _recall.recognise is _recall.not_known


@pytest.mark.usefixtures("unloaded")
def test_nobody_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while another thread compiles goes on in Python."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> Any:
        begun.set()
        assert go_on.wait(30)
        raise build.Unavailable("it took too long")

    monkeypatch.setattr(_recall, "built", slow)
    thread = threading.Thread(target=_recall.load)
    thread.start()
    assert begun.wait(30) and works()
    go_on.set()
    assert kernels.calls_recognised_by() == "Python: it took too long"
    thread.join(30)


CHILD = """if True:
    import os, signal, kernels
    from kernels import _native, _recall
    # As if another thread were about to compile.
    _native._state.lock.acquire()
    _recall._lock.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        print(kernels.cpu_path(), kernels.calls_recognised_by(), sep="|", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    _native._state.lock.release()
    _recall._lock.release()
    print(kernels.cpu_path(), kernels.calls_recognised_by(), sep="|")
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parents() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=True
    )
    said = f"{kernels.cpu_path()}|{kernels.calls_recognised_by()}"
    assert done.stdout.splitlines() == [said, said]
