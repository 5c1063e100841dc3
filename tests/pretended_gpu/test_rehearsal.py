"""The first GPU day on the pretended GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.pretended_gpu import build, rehearsal
from tests.processes.nursery import nursery

pytestmark = pytest.mark.slow
SECONDS = 160.0


def rehearse(folder: Path, seconds: float = SECONDS, **given: Any) -> tuple[int | None, str]:
    """Run parts in a process of their own; return its status and what it said."""
    if build.cupy() is None:
        pytest.skip("pip cannot get cupy's wheel")
    log = folder / "log.txt"
    process = nursery().start("tests.pretended_gpu.rehearsal:rehearse", given, {}, log)
    status = process.wait(time.monotonic() + seconds)
    return status, log.read_text(errors="replace")


@pytest.mark.parametrize("part", rehearsal.PARTS)
def test_part_of_the_first_day_ends_as_it_should(part: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    status, said = rehearse(tmp_path, parts={part: {}})
    assert status == 0 and f"{part}: as it should be" in said, said[-6000:]
