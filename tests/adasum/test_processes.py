"""Processes over gloo against trees and trajectories computed in this process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.adasum.definition import (
    relative_error,
    tolerance,
    trajectory,
    trajectory_tolerance,
    tree,
)
from tests.adasum.jobs import DTYPES, STEPS, TRAJECTORIES, inputs, process_job
from tests.processes.harness import run_ranks

BOUNDS = (0, 1, 130, 900, 1003)


@pytest.mark.parametrize("size", [2, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_training_in_processes_equals_the_definition(size: int) -> None:
    results = run_ranks(size, process_job, size, BOUNDS, timeout=120.0)
    results = [
        {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in result.items()}
        for result in results
    ]
    vectors = inputs(size, size, BOUNDS[-1])
    for rank, result in enumerate(results):
        assert result["locality"] == (rank, size, rank, size)
        for key, value in result.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, results[0][key]), (
                    f"{key}: rank {rank} differs from rank 0"
                )
        assert result["large"] == results[0]["large"]
        assert result["large error"] <= tolerance(torch.float32)
        assert result["objects"] == [{"rank": r, "list": [1, "two", None]} for r in range(size)]
    got = results[0]
    for name, dtype in DTYPES.items():
        rounded = [v.to(dtype) for v in vectors]
        assert relative_error(got[f"whole {name}"], tree(rounded)) <= tolerance(dtype)
        want = tree(rounded, BOUNDS)
        for low, high in itertools.pairwise(BOUNDS):
            error = relative_error(got[f"grouped {name}"][low:high], want[low:high])
            assert error <= tolerance(dtype)
    # A sum of n terms rounds at most n times, each by eps/2.
    average = torch.stack(vectors).mean(0)
    assert relative_error(got["average"], average) <= size * torch.finfo(torch.float64).eps
    rows = [torch.full((r + 1, 2), float(r)) for r in range(size)]
    assert torch.equal(got["gathered"], torch.cat(rows).double())
    if size <= 4:
        for op, kind, passes in TRAJECTORIES:
            want = trajectory(op, kind, size, passes, STEPS)
            error = relative_error(got[f"{op} {kind} {passes}"], want)
            assert error <= trajectory_tolerance(STEPS), (op, kind, passes, error)
