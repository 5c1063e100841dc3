"""What a program is told of how it runs: one line at start, and a warning where it is worse."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from collectives.bootstrap.report import report
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from collectives.transport.connections import shm_listener
from kernels.cpu import dispatch, native
from tests.collectives.transport.thread_ranks import connect


def test_report_of_many_ranks_names_their_number_and_hosts() -> None:
    transport = ThreadWorld(4).transport(2)
    text = report(transport, "auto", [0, 0, 1, 1], Topology(4, 2))
    assert text.startswith("rank 2 of 4 on 2 host(s): ")
    assert "sums of CPU tensors by rd at 4 KiB, rechd at 1 MiB, xring at 64 MiB; " in text


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


def test_missing_compiled_kernels_are_a_warning_unless_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        raise native.Unavailable("they were not compiled")

    monkeypatch.setattr(native, "load", load)
    with caplog.at_level(logging.WARNING, logger="kernels"):
        monkeypatch.setenv("ADASUM_CPU_KERNELS", "torch")
        dispatch._load()
        assert not caplog.messages
        monkeypatch.setenv("ADASUM_CPU_KERNELS", "auto")
        dispatch._load()
    (said,) = caplog.messages
    assert "they were not compiled (ADASUM_CPU_KERNELS=torch says that this is" in said
