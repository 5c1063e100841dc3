"""The emulator's search for tensors while other threads run, as when ranks are threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator.memory import GlobalMemory, _tensors

SECONDS = 0.5


@pytest.fixture
def _frequent_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_search_while_threads_fill_tuples_disturbs_none_of_them():
    """Python raises SystemError in a thread whose unfinished tuple is held by something else."""
    errors: list[BaseException] = []
    over = threading.Event()

    def fill() -> None:
        try:
            while not over.is_set():
                assert len(tuple(i + 1 for i in range(3000))) == 3000
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not errors:
        GlobalMemory(None)
    over.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_search_while_objects_are_made_finds_all_tensors():
    kept: list[torch.Tensor] = []
    for i in range(100):
        kept += [torch.zeros(2), torch.nn.Parameter(torch.zeros(3))]
        rubbish = [[j] for j in range(37 * i % 900)]
        found = [id(tensor) for tensor in _tensors()]
        assert len(found) == len(set(found))
        assert {id(tensor) for tensor in kept}.issubset(found)
        del rubbish


def test_search_asks_no_class_for_its_hash():
    """A hash written in Python, as a protocol has it, would let another thread run."""
    asked = []

    class Asking(type):
        def __hash__(cls) -> int:
            asked.append(cls)
            return type.__hash__(cls)

    class Thing(metaclass=Asking):
        pass

    there = [Thing(), torch.ones(3)]
    asked.clear()
    assert any(tensor is there[1] for tensor in _tensors())
    assert not asked


def test_tensor_of_torch_func_that_outlives_its_function_is_passed_over():
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x + 1

    torch.func.vmap(keep)(torch.ones(2, 3))
    assert any(tensor is kept[0] for tensor in _tensors())
    GlobalMemory(None)
