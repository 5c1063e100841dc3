"""Skip the tests of the pretended GPU where torch brings CUDA's own code."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _without_cuda() -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA, and would call the real driver")
