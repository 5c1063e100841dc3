"""The script that runs torch's tests: the verdicts on their outcomes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch_conformance import batch
from tests.torch_conformance.__main__ import report
from tests.torch_conformance.batch import Outcome
from tests.torch_conformance.expected import expected


def test_outcome_is_the_worst_of_the_ranks_and_no_echo_of_another_failure() -> None:
    ranks = [(1.0, "failed", "Connection closed by peer"), (2.0, "passed", "")]
    assert min(ranks, key=batch._worst_first) == ranks[0]
    ranks += [(3.0, "skipped", "no GPU"), (4.0, "failed", "ValueError: only here")]
    assert min(ranks, key=batch._worst_first) == ranks[3]


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


@pytest.mark.slow
def test_name_of_no_test_is_an_error() -> None:
    # In a process of its own: torch's test modules are imported with stand-ins for a GPU.
    command = [sys.executable, "-m", "tests.torch_conformance", "--only", "no_such_test"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no such test" in done.stderr
