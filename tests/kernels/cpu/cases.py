"""What the tests of the compiled functions ask."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.kernels.cases import random


def need_compiled() -> None:
    if why_not := kernels.backend_info().why_torch:
        pytest.skip(f"no compiled CPU path: {why_not}")


def works() -> bool:
    a, b = (random(1000, torch.float32, "cpu", seed) for seed in (1, 2))
    return torch.equal(kernels.scaled_add(a, b, alpha=0.5, beta=2.0), a * 0.5 + b * 2.0)
