"""1,200 steps leave no more memory in use than 300 steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import adasum as hvd
from adasum import DistributedOptimizer
from tests.adasum.jobs import OPS
from tests.adasum.trainings import WAYS
from tests.processes.harness import run_ranks

STEPS, SETTLED = 1200, 300
NUMEL = 32 * 1024
# A lost gradient a step would be 128 KiB x 900 steps; the allocator's own unrest is some MiB.
GROWTH = 16 * 2**20
# A lost Python object a step would be 900.
OBJECTS = 500


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def job(rank: int, way: str) -> tuple[int, int]:
    """(bytes, Python objects) more in use after STEPS steps than after SETTLED."""
    hvd.init(timeout=60.0)
    op, options = WAYS[way]
    parameters = [torch.nn.Parameter(torch.zeros(NUMEL // 4)) for _ in range(4)]
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.01, momentum=0.9), op=OPS[op], groups=2, **options
    )
    sizes = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        sum((p - rank).square().sum() for p in parameters).backward()
        optimizer.step()
        if step in (SETTLED, STEPS):
            gc.collect()
            sizes.append((_resident(), len(gc.get_objects())))
    hvd.shutdown()
    return sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["average", "delta", "in backward"])
def test_memory_over_many_steps_does_not_grow(way: str) -> None:
    for nbytes, objects in run_ranks(2, job, way, timeout=150.0):
        assert nbytes < GROWTH
        assert objects < OBJECTS
