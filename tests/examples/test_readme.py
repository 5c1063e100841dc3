"""Every Python snippet of the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_readme_has_a_snippet_for_every_package():
    for door in ("import kernels", "import collectives", "import adasum"):
        assert any(door in snippet for snippet in SNIPPETS), door


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.splitlines()[0][:40])
def test_readme_snippet_runs(snippet, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    started_by = []
    if "init_process_group" in snippet:
        started_by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *started_by, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
