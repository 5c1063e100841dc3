"""Calls that C makes again, where a mode of torch's dispatcher is to see them: not made in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.conftest import forget_calls
from tests.kernels.recall_case import Case

FUNCTIONS = ["pack", "unpack", "sum_n", "scaled_add"]


@pytest.fixture(autouse=True)
def no_call_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_calls(monkeypatch)


class Watching(TorchDispatchMode):
    """Runs everything, and says what of the kernels it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "adasum":
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
@pytest.mark.parametrize("first_seen", [False, True], ids=["", "first seen"])
def test_a_mode_sees_what_was_known_before_it(
    function: str, given: bool, first_seen: bool, no_python: Callable[[], None]
) -> None:
    case = Case(function, torch.float32, False, given, True)
    case.fill(1)
    if first_seen:
        with Watching() as mode:
            for _ in range(4):
                case.call()
        assert mode.seen == [function] * 4
    expected = [case.results() for _ in range(4)][-1]
    for _ in range(3):
        with Watching() as mode:
            assert case.results() == expected
        assert mode.seen == [function]
    no_python()
    assert case.results() == expected


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_trace_has_what_was_known_before_it(function: str) -> None:
    """As a call, not as the values of its tensors then."""
    case = Case(function, torch.float32, False, True, False)
    case.fill(1)
    for _ in range(4):
        case.call()

    def traced(*given: torch.Tensor) -> torch.Tensor:
        assert [id(one) for one in given] == [id(one) for one in [*case.tensors, case.whole]]
        case.call()
        return case.whole.sum() + sum(one.sum() for one in case.tensors)

    graph = make_fx(traced)(*case.tensors, case.whole)
    assert f"torch.ops.adasum.{function}" in graph.code
