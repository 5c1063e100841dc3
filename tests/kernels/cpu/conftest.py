"""A process that has not looked for the compiled functions."""

from __future__ import annotations

import pytest

from kernels.cpu import dispatch


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looked for yet, and nothing asked for."""
    monkeypatch.setattr(dispatch, "_state", {})
    monkeypatch.delenv("ADASUM_CPU_KERNELS", raising=False)
