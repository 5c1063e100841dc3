"""What of a reduction backward hides where it mostly waits: two hosts on a slow link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.network_namespaces.network import Hosts, why_not


@pytest.mark.timing
def test_backward_hides_the_reduction(tmp_path: Path) -> None:
    """A bucket is one of twelve layers; the last can be hidden behind nothing: 11/12 at most."""
    if reason := why_not():
        pytest.skip(reason)
    out = tmp_path / "overlap.json"
    options = ("--batch", "10240", "--bucket", "1.1", "-n", "7")
    with Hosts(2, rate="100mbit") as hosts:
        hosts.torchrun(
            "bench.collectives.overlap",
            "-J",
            str(out),
            *options,
            local_size=1,
            transport="auto",
            logs=tmp_path,
        )
        hosts.wait_for([out], 120.0)
    answer = json.loads(out.read_text())
    assert answer["backward ms"] > answer["reduction ms"], answer
    assert answer["hidden"] >= 0.7, answer
