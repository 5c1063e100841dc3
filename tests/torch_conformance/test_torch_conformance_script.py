"""The script that runs torch's tests, on a small suite of its own in the place of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.torch_conformance import batch
from tests.torch_conformance.__main__ import report
from tests.torch_conformance.batch import Outcome
from tests.torch_conformance.expected import ALONE, LOST, REFUSALS, SKIPPED, expected
from tests.torch_conformance.suites import Rank, Suite


class Small(unittest.TestCase):
    """The name of each says what becomes of it; they run in the order of the alphabet."""

    __test__ = False  # pytest is not to run it.
    hook: bool
    rank: int
    seen: int = 0

    def test_a_passes(self) -> None:
        type(self).seen = os.getpid()
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [2, 2]
        assert self.hook

    def test_b_sees_the_process_of_the_one_before(self) -> None:
        assert self.seen == os.getpid()

    def test_c_fails_on_one_rank(self) -> None:
        if self.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    def test_d_sees_a_new_process(self) -> None:
        assert not self.seen

    def test_e_dies(self) -> None:
        if self.rank == 1:
            os._exit(3)

    def test_f_never_ends(self) -> None:
        time.sleep(1000)

    def test_g_skips(self) -> None:
        self.skipTest("no GPU")

    def test_h_leaves_as_tests_of_torch_skip(self) -> None:
        sys.exit(75)


def small_names() -> list[str]:
    return unittest.defaultTestLoader.getTestCaseNames(Small)  # type: ignore[return-value]


def small_case(name: str, place: Rank) -> unittest.TestCase:
    """Make a test case that knows its rank, and whether our hook is used."""
    test = Small(name)
    test.rank, test.hook = place.rank, place.hook
    return test


SMALL = Suite("small", (2,), small_names, small_case)


@pytest.mark.slow
def test_outcomes_are_the_worst_of_the_ranks_and_new_ranks_follow_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "SECONDS", 20.0)
    monkeypatch.setattr(batch, "GRACE", 1.0)
    outcomes = batch.run(f"{__name__}:SMALL", SMALL.names(), 2, True)
    assert {name[5:6]: (each.outcome, each.said) for name, each in outcomes.items()} == {
        "a": ("passed", ""),
        "b": ("passed", ""),
        "c": ("failed", "ValueError: only here"),
        "d": ("passed", ""),
        "e": ("failed", "a rank ended with 3"),
        "f": ("failed", "not done after 20 s"),
        "g": ("skipped", "no GPU"),
        "h": ("skipped", "Need at least 1 CUDA device"),
    }


@pytest.mark.parametrize(
    ("name", "hook", "outcome", "good"),
    [
        ("test_ddp_device", False, ("failed", "why"), True),
        ("test_ddp_device", True, ("failed", "why"), True),
        ("test_of_ours", True, ("passed", ""), True),
        ("test_ddp_device", False, ("passed", ""), False),
        ("test_ddp_device", True, ("skipped", "why"), False),
        ("test_ddp_comm_hook_logging", True, ("passed", ""), False),
        ("test_ddp_comm_hook_logging", False, ("failed", "why"), False),
        ("test_of_ours", True, ("failed", "why"), False),
        ("test_of_ours", True, ("skipped", "why"), False),
        # A refusal that has another reason.
        ("test_owners_LBFGS", True, ("failed", "RuntimeError: size mismatch"), False),
    ],
)
def test_report_is_good_where_each_outcome_is_the_listed_one(
    name: str,
    hook: bool,
    outcome: tuple[str, str],
    good: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report("title", 2, hook, {name: Outcome(*outcome, 0.1)}) == good
    assert ("UNEXPECTED" in capsys.readouterr().out) != good


def test_expected_outcome_of_a_number_of_ranks_is_for_that_number_alone() -> None:
    name = "test_ddp_apply_optim_in_backward"
    assert [expected(name, size, False)[0] for size in (2, 3)] == ["passed", "failed"]
    assert [expected(name, size, True)[0] for size in (2, 3)] == ["failed", "failed"]


def test_lists_have_no_test_twice_and_a_refusal_for_every_text() -> None:
    lists = [ALONE, LOST, SKIPPED]
    names = [name for each in lists for name in each]
    assert len(names) == len(set(names))
    assert REFUSALS.keys() <= set(LOST.values())


@pytest.mark.slow
def test_name_of_no_test_is_an_error() -> None:
    # In a process of its own: torch's test modules are imported with stand-ins for a GPU.
    command = [sys.executable, "-m", "tests.torch_conformance", "--only", "no_such_test"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no such test" in done.stderr
