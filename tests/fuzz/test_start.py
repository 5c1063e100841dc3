"""Start-up, process sets, the optimizer and the hooks on awkward arguments, on one rank.

The rank is alone, and is one of torch.distributed's (gloo, a world of one) where a function needs
that.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import adasum
import collectives
from adasum import Adasum, Average, Compression, HookState, ProcessSet, Sum
from adasum.orthogonality import Recorder, orthogonality
from tests.fuzz.outcome import SETTINGS, Recipe, attempt
from tests.fuzz.values import Arg, Look, sometimes, tensors, value

Strategy = st.SearchStrategy[Arg]
LOOK = Look((2, 3), torch.float32)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _init(**options: Any) -> None:
    """Starts, and ends again."""
    try:
        adasum.init(**options)
    finally:
        adasum.shutdown()


def _from_process_group(process_group: Any, timeout: Any) -> None:
    collectives.from_process_group(process_group, timeout=timeout).close()


@contextmanager
def _alone() -> Iterator[None]:
    """A default group of one, for as long as a call takes."""
    collectives.init()
    try:
        yield
    finally:
        collectives.shutdown()


def _with_group(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _alone():
            return function(*args, **options)

    return call


def _sgd() -> Arg:
    return Arg("<SGD>", lambda memory: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0))


OP = value(Sum, Average, Adasum)
STATE = Arg("<HookState>", lambda memory: HookState(Adasum))
MODEL = Arg("<Linear>", lambda memory: torch.nn.Linear(2, 2))
SIGNATURES: dict[str, tuple[Any, list[Strategy], dict[str, Strategy]]] = {
    "DistributedOptimizer": (
        _with_group(adasum.DistributedOptimizer),
        [sometimes(value(None), st.just(_sgd()))],
        {
            "named_parameters": value(None, [], [("a", 1)], [("a", torch.ones(2))]),
            "compression": value(Compression.none, Compression.fp16),
            "backward_passes_per_step": value(1, 2, 0),
            "op": OP,
            "gradient_predivide_factor": value(1.0, 2, -1.0),
            "groups": value(None, 1, 2, [[torch.ones(2)]]),
            "sparse_as_dense": value(False, True),
            "process_set": value(None, adasum.global_process_set),
            "algorithm": value(None, "vhdd", "rd"),
            "mode": value(None, "owners", "owner"),
            "weighted": value(True, False),
            "check_parameters": value(None, True, False),
            "method": value(None, "delta", "gradient"),
            "step_in_backward": value(False, True),
            "memory_size": value(None, 1.0, -1),
            "groups_size": value(None, 1, 0),
        },
    ),
    "GradientRecorder": (
        adasum.GradientRecorder,
        [value(1, 10, 0, -1)],
        {
            "max_rows": value(1, 100_000, 0, True),
            "factor": value(2.0, 3, 1.0, -1.0, math.nan),
            "group": value(None),
            "copies": value(False, True),
            "on_step": value(None, print),
        },
    ),
    "HookState": (
        HookState,
        [],
        {
            "op": OP,
            "algorithm": value(None, "vhdd"),
            "process_group": value(None, 3),
            "timeout": value(1.0, 0, -1),
            "named_parameters": value((), [("a", torch.ones(1))]),
            "check_parameters": value(None, True, False),
        },
    ),
    "ProcessSet": (ProcessSet, [value([0], [0, 1], [])], {}),
    "Recorder": (Recorder, [value(1, 10, 0)], {"group": value(None)}),
    "from_process_group": (
        _from_process_group,
        [value(None), value(1.0, 5, 0)],
        {},
    ),
    "init": (
        _init,
        [],
        {
            "process_sets": value(None, [[0]], "dynamic", "static"),
            "timeout": value(1.0, 5, -1),
            "transport": value(None, "auto", "gloo", "shm"),
            "process_group": value(None),
        },
    ),
    "orthogonality": (_with_group(orthogonality), [tensors(LOOK)], {"group": value(None)}),
    "register_fsdp_hook": (
        adasum.register_fsdp_hook,
        [
            sometimes(st.just(MODEL), value(None), 2),
            sometimes(st.just(STATE), value(None), 2),
        ],
        {},
    ),
    "run_threads": (
        collectives.run_threads,
        [value(1, 2, 0, -1), value(lambda group: group.size)],
        {"timeout": value(1.0, 0), "local_size": value(None, 1, 2, 3)},
    ),
}
NAMES = sorted(SIGNATURES)


@st.composite
def _recipes(draw: Any, name: str) -> Recipe:
    function, positional, keywords = SIGNATURES[name]
    args = tuple(draw(strategy) for strategy in positional)
    given_names = [key for key in keywords if draw(st.booleans())]
    return Recipe(function, args, {key: draw(keywords[key]) for key in given_names})


def check(name: str, data: st.DataObject) -> None:
    """One call, which changes no tensor."""
    rejections = (TypeError, ValueError, NotImplementedError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(data.draw(_recipes(name)), rejections, reads_only=True)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_start_functions_raise_documented_errors_only(name: str, data: st.DataObject) -> None:
    check(name, data)
