"""The command `adasum`, and the modules that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from adasum.__main__ import main
from adasum.bits import torch_facts
from tests.processes.commands import ran


def test_command_runs_a_module_and_ends_with_its_status(tmp_path: Path) -> None:
    done = ran(sys.executable, "-m", "adasum", "flight", tmp_path)
    alone = ran(sys.executable, "-m", "collectives.flight", tmp_path)
    assert done.returncode == alone.returncode == 2
    assert done.stderr == alone.stderr and done.stdout == alone.stdout


def test_command_takes_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedules", "table", "rd", "2"]) == 0
    assert "step" in capsys.readouterr().out


def test_without_a_command_there_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "adasum.check" in capsys.readouterr().out
    assert main(["chek"]) == 2
    assert "no command 'chek'" in capsys.readouterr().err


def test_bits_does_not_warn_of_itself(tmp_path: Path) -> None:
    file = tmp_path / "bits.json"
    file.write_text(json.dumps({"reduction": {"op": "Sum"}, "torch": torch_facts()}))
    done = ran(sys.executable, "-m", "adasum.bits", file)
    assert "gradients are reduced:" in done.stdout
    assert "RuntimeWarning" not in done.stderr
