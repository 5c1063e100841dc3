"""One conformance suite for every transport, in threads and in real processes."""

from __future__ import annotations

from functools import cache

import pytest

import collectives
from tests.processes.conformance import CHECKS, run_checks, run_checks_in_process
from tests.processes.harness import run_ranks


@cache
def _results(transport: str, size: int) -> list[dict[str, str]]:
    if transport == "threads":
        return collectives.run_threads(size, run_checks)
    return run_ranks(size, run_checks_in_process, transport)


@pytest.mark.parametrize("check", sorted(CHECKS))
@pytest.mark.parametrize(
    ("transport", "size"),
    [
        *(("threads", size) for size in (1, 2, 3)),
        *(("gloo", 2), ("gloo", 3), ("shm", 3), ("hybrid", 3), ("hybrid", 5)),
        pytest.param("hybrid", 4, marks=pytest.mark.slow),
    ],
)
def test_transport(transport: str, size: int, check: str) -> None:
    failures = [
        f"rank {r}: {out[check]}" for r, out in enumerate(_results(transport, size)) if out[check]
    ]
    assert not failures, "\n".join(failures)
