"""Caches of what is compiled, empty and filled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.cpu import dispatch, native
from tests.kernels.cpu.cases import need_compiled


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing looked for yet, in a home of its own; the folder of the cache."""
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
    return tmp_path / "cache" / "adasum"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that is compiled here."""
    need_compiled()
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        native.build()
    (made,) = (home / "adasum").iterdir()
    return made


@pytest.fixture
def built(library: Path, fresh: Path) -> Path:
    """The folder of a cache that holds what was compiled before, of which nothing is loaded."""
    fresh.mkdir(mode=0o700, parents=True)
    shutil.copy2(library, fresh)
    return fresh
