"""The script that runs Horovod's tests, on a small file of its own in the place of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.horovod_conformance.__main__ import TORCH, report, run
from tests.horovod_conformance.expected import DIFFERENT, SKIPPED

FILE = """
import unittest
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import synchronize

class Tests(unittest.TestCase):
    def test_that_fails_on_one_rank(self):
        hvd.init()
        assert hvd.rank() == 0, "not rank 0"
        synchronize(hvd.allreduce_async(torch.ones(2)))

    def test_that_passes(self):
        hvd.init()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]

    def test_orthogonal(self):
        assert torch.cuda.is_available() and hvd.mpi_enabled()
        assert torch.ones(2).cuda(1).to(torch.device("cuda:1")).is_cpu

    def test_that_skips(self):
        if not torch.cuda.is_available():
            self.skipTest("no GPU")
"""


@pytest.mark.slow
def test_outcomes_of_a_test_file_are_the_worst_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / TORCH
    path.parent.mkdir(parents=True)
    path.write_text(FILE)
    outcomes = run(tmp_path, TORCH, 2, timeout=2.0)
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        "test_orthogonal": "passed",
        "test_that_fails_on_one_rank": "failed",
        # The ranks begin it with a new group.
        "test_that_passes": "passed",
        "test_that_skips": "skipped",
    }
    assert not report(TORCH, 2, outcomes)
    printed = capsys.readouterr().out
    assert "2 of 4 passed (1 of them with the CPU in place of GPUs), 1 skipped" in printed
    assert "UNKNOWN: Skipped: no GPU" in printed


def test_report_of_known_outcomes_is_good() -> None:
    outcomes = {name: ["failed", "why"] for name in DIFFERENT}
    outcomes |= {name: ["skipped", "why"] for name in SKIPPED}
    assert report(TORCH, 2, outcomes)
    assert not report(TORCH, 2, {next(iter(SKIPPED)): ["failed", "why"]})
