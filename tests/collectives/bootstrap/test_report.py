"""What a program is told of how it runs: one line at start, and a warning where it is worse."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.bootstrap.report import report
from collectives.cost import ASSUMED
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from collectives.transport.connections import shm_listener
from kernels.cpu import dispatch, native
from kernels.cpu.build import Unavailable
from tests.collectives.transport.thread_ranks import connect

ROOT = Path(__file__).parents[3]


CODE = "import adasum; adasum.init(); adasum.init()"


def _run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )
    return done.stderr


def test_adasum_log_info_shows_one_line_at_init() -> None:
    (line,) = _run(CODE, ADASUM_LOG="info").splitlines()
    assert " INFO collectives.initialize: rank 0 of 1 on 1 host(s): transport='auto'" in line
    assert "; CPU kernels " in line and "; NCCL " in line


@pytest.mark.slow
def test_adasum_log_is_silent_where_it_should_be_and_refuses_other_words() -> None:
    assert _run(CODE, ADASUM_LOG="") == ""
    mine = "import logging; logging.basicConfig(format='mine %(message)s');"
    (line,) = _run(mine + CODE, ADASUM_LOG="INFO").splitlines()
    assert line.startswith("mine rank 0 of 1")
    (line,) = _run(CODE, ADASUM_LOG="loud").splitlines()
    assert "WARNING kernels: ADASUM_LOG must be one of debug, info, warning, error, got" in line


def test_report_of_many_ranks_names_their_number_and_hosts() -> None:
    transport = ThreadWorld(4).transport(2)
    text = report(transport, "auto", [0, 0, 1, 1], Topology(4, 2), ASSUMED)
    assert text.startswith("rank 2 of 4 on 2 host(s): ")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd")
def test_a_full_backlog_is_a_warning_that_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Narrow(shm_listener.socket.socket):  # type: ignore[name-defined, misc]
        def listen(self, backlog: int = 0) -> None:
            super().listen(0)

    monkeypatch.setattr(shm_listener.socket, "socket", Narrow)
    with caplog.at_level(logging.WARNING, logger="collectives"):
        transports = connect(4)
    for transport in transports:
        transport.close()
    said = [each for each in caplog.messages if "no connection through shared memory" in each]
    assert said
    assert "and takes a slower way" in said[0]
    assert "net.core.somaxconn" in said[0]


def test_a_missing_compiler_is_a_warning_unless_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Any:
        raise Unavailable("no C compiler on the PATH")

    monkeypatch.setattr(native, "build", build)
    with caplog.at_level(logging.WARNING, logger="kernels"):
        monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
        dispatch._load()
        assert not caplog.messages
        monkeypatch.setenv("ADASUM_CPU_KERNELS", "auto")
        dispatch._load()
    (said,) = caplog.messages
    assert "no C compiler on the PATH (ADASUM_CPU_KERNELS=torch says that this is" in said
