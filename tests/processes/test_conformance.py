"""One conformance suite for every transport, in threads and in real processes."""

from __future__ import annotations

import pytest

import collectives
from tests.processes.conformance import check_in_process, check_transport
from tests.processes.harness import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads(size: int) -> None:
    collectives.run_threads(size, check_transport)


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        *(("gloo", 2), ("gloo", 3), ("shm", 3), ("hybrid", 3), ("hybrid", 5)),
        pytest.param("hybrid", 4, marks=pytest.mark.slow),
    ],
)
def test_transport(transport: str, size: int) -> None:
    run_ranks(size, check_in_process, transport)
