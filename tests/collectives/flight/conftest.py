from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collectives.tools.flight import writer


@pytest.fixture
def flight_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path | str], None]]:
    """Sets ADASUM_FLIGHT_FOLDER, which is read once, for this process."""

    def change(path: Path | str) -> None:
        monkeypatch.setenv("ADASUM_FLIGHT_FOLDER", str(path))
        writer.folder.cache_clear()

    yield change
    writer.folder.cache_clear()
