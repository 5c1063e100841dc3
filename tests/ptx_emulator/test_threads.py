"""The emulator beside other threads of its process, as where ranks are threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.ptx_emulator.memory import GlobalMemory, _tensors

SECONDS = 1.0


@pytest.fixture
def _quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_turns")
def test_threads_may_fill_tuples_while_memory_is_looked_through():
    """Python ends such a call with a SystemError where something else holds the tuple."""
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


def test_all_tensors_are_found_whatever_is_made_meanwhile():
    kept: list[torch.Tensor] = []
    for i in range(100):
        kept += [torch.zeros(2), torch.nn.Parameter(torch.zeros(3))]
        rubbish = [[j] for j in range(37 * i % 900)]
        found = [id(tensor) for tensor in _tensors()]
        assert len(found) == len(set(found))
        assert {id(tensor) for tensor in kept}.issubset(found)
        del rubbish


def test_no_class_is_asked_for_its_hash_while_memory_is_looked_through():
    """One that is written in Python, as of a protocol, would let another thread go on."""
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
