"""The published table of CPU kernels is of the code that is there, or says that it is not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TABLES = ROOT / "bench" / "results" / "cpu" / "tables.md"
# What a call on CPU tensors passes through, and what measures it.
PATHS = ("kernels", ":!kernels/gpu", "bench/kernels", "setup.py")


# Where times are taken the table can be made anew: `make bench`.
@pytest.mark.timing
def test_published_table_is_of_the_code_that_is_here_or_says_that_it_is_not() -> None:
    text = TABLES.read_text()
    if "**Of an earlier state of the code**" in text:
        return
    found = re.search(r"^- commit: (\w+)$", text, re.M)
    assert found, "the table is of a state that was not committed"
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", found[1]], capture_output=True, check=False)
    if known.returncode:
        pytest.skip(f"no git, or a history without {found[1]}")
    compare = [*git, "diff", "--name-only", found[1], "--", *PATHS]
    changed = subprocess.run(compare, capture_output=True, text=True, check=True).stdout.split()
    assert not changed, f"changed since {found[1]}: {', '.join(changed)}: run `make bench`"
