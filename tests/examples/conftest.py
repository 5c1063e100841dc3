"""Fixtures of the examples' tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch):
    """Loads a module of examples/; torch has its number of threads afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
