"""Sleeping until a word of shared memory changes, and doing without where there is no futex."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable

import pytest

from collectives.transport import futex

linux = pytest.mark.skipif(sys.platform != "linux", reason="futexes are Linux's")


@linux
def test_wait_for_another_value_returns_at_once() -> None:
    word = ctypes.c_uint32(7)
    start = time.monotonic()
    futex.wait(ctypes.addressof(word), 8, 60.0)
    assert time.monotonic() - start < 10.0


@linux
def test_wait_that_nobody_wakes_returns_in_time() -> None:
    word = ctypes.c_uint32(7)
    start = time.monotonic()
    futex.wait(ctypes.addressof(word), 7, 0.05)
    assert 0.04 < time.monotonic() - start < 10.0


def _woken_by(start: Callable[[Callable[[], None]], None], address: int) -> None:
    """Wait for a word to be 1 that `start` has another change after a while."""
    word = ctypes.c_uint32.from_address(address)

    def change() -> None:
        time.sleep(0.2)
        word.value = 1
        futex.wake(address)

    began = time.monotonic()
    start(change)
    while not word.value:
        futex.wait(address, 0, 60.0)
    assert time.monotonic() - began < 30.0


@linux
def test_wake_from_another_process_ends_the_wait() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    held = ctypes.c_uint32.from_buffer(memory)
    children = []

    def fork(change: Callable[[], None]) -> None:
        child = os.fork()
        if not child:
            try:
                change()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)

    _woken_by(fork, ctypes.addressof(held))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


@linux
def test_wait_at_a_bad_address_raises() -> None:
    with pytest.raises(OSError, match="futex"):
        futex.wait(1, 0, 0.0)


@linux
def test_sandbox_that_forbids_futexes_later_makes_them_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks go on without; other errors stay errors."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(futex, "available", True)
    monkeypatch.setattr(futex, "_holding", refuse)
    futex.wake(0)
    assert not futex.available
