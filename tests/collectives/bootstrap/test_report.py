"""What a program is told of how it runs: one line at start, and a warning where it is worse."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from collectives.bootstrap.transport_selection import report
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from kernels.cpu import dispatch, native


def test_report_of_many_ranks_names_their_number_and_hosts() -> None:
    transport = ThreadWorld(4).transport(2)
    text = report(transport, "auto", [0, 0, 1, 1], Topology(4, 2))
    assert text.startswith("rank 2 of 4 on 2 host(s): ")
    assert "by rd at 4 KiB, xring/xring at 1 MiB, xring/xring at 64 MiB; " in text


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
