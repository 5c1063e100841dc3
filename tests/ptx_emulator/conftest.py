"""Launches that look through few objects."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _freeze_tensors() -> None:
    """Else each launch looks through all that other files' tests have left: a quarter of a second.

    Where the emulator is the driver of Triton, it freezes them itself.
    """
    from tests.ptx_emulator.memory import freeze_tensors

    freeze_tensors()
