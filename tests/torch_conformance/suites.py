"""The suites: their tests, on how many ranks, and what stands in for what while they run."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torch_conformance import torch_ddp, torch_optimizers


@dataclass(frozen=True)
class Rank:
    """What a test case is told of the process it runs in; `directory` is the test's own."""

    rank: int
    size: int
    hook: bool
    directory: Path


@dataclass(frozen=True)
class Suite:
    """Tests that run on every rank.

    Attributes:
        title: How the report calls them.
        sizes: On how many ranks they run.
        names: The tests' names.
        case: Makes a test case, whose method of that name runs here.
        stand_ins: A context in which a rank runs all its tests; told whether our hook is used.
        compared: Whether they run by gloo and by the backend adasum, to compare them.
        alone: Whether they also run with torch by itself, which says what the CPU loses.
    """

    title: str
    sizes: tuple[int, ...]
    names: Callable[[], list[str]]
    case: Callable[[str, Rank], unittest.TestCase]
    stand_ins: Callable[[bool], AbstractContextManager[Any]] = lambda _: nullcontext()
    alone: bool = True
    compared: bool = False


DDP = Suite("torch's tests of DDP", (2, 3), torch_ddp.names, torch_ddp.case, torch_ddp.stand_ins)
BACKEND = Suite(
    "torch's tests of a backend",
    (2, 4),
    torch_ddp.all_names,
    torch_ddp.case,
    torch_ddp.backend_stand_ins,
    compared=True,
)
OPTIMIZERS = Suite(
    "torch's optimizers, wrapped, on equal data",
    (2,),
    torch_optimizers.names,
    torch_optimizers.case,
    alone=False,
)
# Where a rank finds each, by the name that --only knows.
SUITES = {name.lower(): f"{__name__}:{name}" for name in ("BACKEND", "DDP", "OPTIMIZERS")}
