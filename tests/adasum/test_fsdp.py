"""The hook for FSDP2, between real processes over gloo."""

from __future__ import annotations

import pytest

from tests.adasum.fsdp_jobs import CHECKS, fsdp_job
from tests.multi_rank.harness import run_ranks


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (3, 1), (2, 2)])
def test_gradients_equal_the_definition(replicas: int, shards: int) -> None:
    size = replicas * shards
    names = [check.__name__ for check in CHECKS]
    assert run_ranks(size, fsdp_job, replicas, shards, timeout=150.0) == [names] * size
