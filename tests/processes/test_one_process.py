"""A process without others: what it logs at the start, and how it ends where something is late."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.processes.commands import ROOT, python
from tests.processes.nursery import nursery

INIT = "import adasum; adasum.init(); adasum.init()"


def _said(code: str, **variables: str) -> str:
    """Return what a program that ends well writes to stderr."""
    code = f"import sys; sys.stderr = sys.stdout; {code}"
    return python("-c", code, PYTHONPATH=str(ROOT), **variables)


def test_adasum_log_info_shows_one_line_at_init() -> None:
    (line,) = _said(INIT, ADASUM_LOG="info").splitlines()
    assert " INFO collectives.initialize: rank 0 of 1 on 1 host(s): transport='auto'" in line
    assert "; CPU kernels " in line and "; NCCL " in line


@pytest.mark.slow
def test_adasum_log_is_silent_where_it_should_be_and_refuses_other_words() -> None:
    assert _said(INIT, ADASUM_LOG="") == ""
    mine = "import logging; logging.basicConfig(format='mine %(message)s');"
    (line,) = _said(mine + INIT, ADASUM_LOG="INFO").splitlines()
    assert line.startswith("mine rank 0 of 1")
    (line,) = _said(INIT, ADASUM_LOG="loud").splitlines()
    assert "WARNING kernels: ADASUM_LOG must be one of debug, info, warning, error, got" in line


def _main(code: str) -> None:
    """Run a program in a process of the nursery; what it holds goes at the interpreter's end."""
    exec(code, sys.modules["__main__"].__dict__)


def _ends(code: str, log: Path, **variables: str) -> tuple[int | None, str]:
    """Return a program's exit status, and what it writes."""
    rank = nursery().start(f"{__name__}:{_main.__name__}", code, variables, log)
    status = rank.wait(time.monotonic() + 40.0)
    rank.send(signal.SIGKILL)
    return status, log.read_text()


EXIT = """
import threading, time, torch
from collectives.transport import Message, ThreadWorld
from collectives.transport.nccl import backend, cupy_backend, transport as nccl
from tests.fakes.fake_cuda import FakeCuda, device_tensor
from tests.fakes.fake_nccl import FakeNccl
nccl.cuda = cupy_backend.cuda = backend.cuda = FakeCuda()
fake = FakeNccl()
cupy_backend.load_nccl = lambda: fake
world, kept = ThreadWorld(2), []
backend.CLOSE_SECONDS = 0.3
message = Message(0, device_tensor(torch.ones(3)))
def rank(r):
    transport = nccl.NcclTransport(world.transport(r), cupy_backend.CupyBackend(), timeout=10.0)
    kept.append(transport)
    if r == 1:
        transport.exchange([message], [message], "a step", 1000.0)
for r in range(2):
    threading.Thread(target=rank, args=(r,), daemon=True).start()
while len(kept) < 2 or not any(clique.letters.get((1, 0)) for clique in fake.cliques.values()):
    time.sleep(0.01)
print("ending", flush=True)
"""


def test_a_process_ends_that_never_closed(tmp_path: Path) -> None:
    """With an exchange under way, too, whose peer never comes."""
    status, said = _ends(EXIT, tmp_path / "log")
    # Triton may say after it what its own library still held.
    assert status == 0 and said.startswith("ending\n") and "Error" not in said, said
