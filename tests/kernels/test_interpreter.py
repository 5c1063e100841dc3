"""The kernel tests once more, on the Triton kernels, in a process where Triton interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_packing.py", "test_reduction.py", "test_projection.py", "test_launches.py")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted")
# The interpreter takes a minute for the largest, longer where the processors are shared.
@pytest.mark.timeout(420)
@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    root = str(here.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / file)],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and " skipped" not in result.stdout
