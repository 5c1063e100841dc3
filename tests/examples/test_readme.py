"""The README's snippets run, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.commands import ROOT, python
from tests.processes.harness import run_ranks, script

README = (ROOT / "README.md").read_text()
LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_readme_has_a_snippet_for_either_way_to_train() -> None:
    for name in ("ddp_hook", "DistributedOptimizer"):
        assert any(name in snippet for snippet in SNIPPETS), name


def test_readme_says_in_its_first_screen_what_has_run() -> None:
    """About 90 lines in all, the status in the first thirty."""
    lines = README.splitlines()
    assert len(lines) <= 95
    assert any("tested on one GPU only" in line for line in lines[:30])


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme_snippet_runs(snippet: str, tmp_path: Path) -> None:
    path = tmp_path / "snippet.py"
    path.write_text(snippet + "\nprint('ended')\n")
    size = 2 if "init_process_group" in snippet else 1
    assert [said[-6:] for said in run_ranks(size, script, str(path))] == ["ended\n"] * size


def test_snippet_without_a_process_group_runs_by_plain_python(tmp_path: Path) -> None:
    """As the README says; for the others it names torchrun before the first block."""
    (snippet,) = [each for each in SNIPPETS if "init_process_group" not in each]
    path = tmp_path / "snippet.py"
    path.write_text(snippet)
    python(path, without=LAUNCHERS, PYTHONPATH=".")
    assert 0 < README.index("torchrun --nproc-per-node") < README.index("```python")
