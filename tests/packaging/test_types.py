"""mypy and pyright on a user's program, who has the packages installed and reads their types."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import collectives
from tests.packaging import typed_program
from tests.processes.commands import ROOT, printed


def check(command: list[str], place: Path) -> None:
    """Run a checker on a copy of the program, from which the packages are found as installed."""
    shutil.copy(typed_program.__file__, place / "program.py")
    printed(*command, place=place, timeout=170.0, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_types_of_a_users_program_by_mypy_are_those_it_asserts(tmp_path: Path) -> None:
    """Strictly, which makes an ignore comment without an error an error, too."""
    pytest.importorskip("mypy", reason="needs mypy: pip install adasum[dev]")
    check([sys.executable, "-m", "mypy", "--strict", "program.py"], tmp_path)


def test_types_of_a_users_program_by_pyright_are_those_it_asserts(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # It brings the node that pyright runs on, which the package pyright fetches when it starts.
    pyright = shutil.which("basedpyright", path=path)
    if pyright is None:
        pytest.skip("needs basedpyright: pip install adasum[dev]")
    settings = {
        "include": ["program.py"],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    check([pyright, "--project", ".", "--pythonpath", sys.executable], tmp_path)


def test_users_program_on_one_rank_runs() -> None:
    collectives.run_threads(1, lambda group: typed_program.main())


def test_mistakes_of_the_program_when_it_runs_are_errors() -> None:
    def run(group: collectives.Group) -> None:
        for mistake in typed_program.wrong(torch.nn.Linear(2, 1), group):
            with pytest.raises((TypeError, ValueError, AttributeError)):
                mistake()

    collectives.run_threads(1, run)
