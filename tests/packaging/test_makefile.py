"""The Makefile's set-up where a Python is there whose torch sees a GPU: .venv borrows it."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = """
class cuda:
    @staticmethod
    def is_available():
        return True
"""


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_environment_borrows_torch_from_a_python_that_lives_in_one_itself(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    venv.create(theirs, symlinks=True)
    (site_packages(theirs) / "torch.py").write_text(textwrap.dedent(TORCH))
    # What an editable or a namespace package leaves there counts, too.
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "found_by_pth.py").write_text("")
    (site_packages(theirs) / "extra.pth").write_text(f"{extra}\n")
    python = theirs / "bin" / "python"
    made = subprocess.run(
        ["make", f"VENV={ours}", f"PYTHON={python}", str(ours / ".made")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "borrowing the torch of" in made.stdout
    code = "import torch, found_by_pth, sys; print(torch.__file__, sys.prefix)"
    found = subprocess.run(
        [ours / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(site_packages(theirs) / "torch.py"), str(ours)]
    # What is installed into it comes first.
    (site_packages(ours) / "torch.py").write_text("")
    found = subprocess.run(
        [ours / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.split()[0] == str(site_packages(ours) / "torch.py")
