"""Sleep until another rank changes a word of shared memory: Linux's futex(2), by the C library.

Without it a rank would look at the word from time to time. Each look may take a core from the rank
that it waits for, and it would notice the change late, by half an interval on average.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
import time

# futex's number among the system calls of each processor, for which the C library has no function;
# and its operations, without FUTEX_PRIVATE_FLAG, since the word is shared between processes.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
# Errors where futexes are forbidden, and those after which a wait has merely ended.
_REFUSED = (errno.ENOSYS, errno.EPERM)
_WOKEN = (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

# How often a rank that waits looks before it sleeps, some 20 us in all; after each look it yields
# the processor. Then it sleeps for at most so many seconds, and looks whether a rank is gone, for
# which no one wakes it.
SPINS, CHECK_SECONDS = 30, 20e-3
# The shortest and the longest sleep without futexes, in seconds.
_MIN_NAP, _MAX_NAP = 20e-6, 1e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def nap(waited: float) -> None:
    """Sleep for a while in a wait without futexes that has lasted `waited` seconds.

    The end of the wait is noticed late by at most an eighth of it.
    """
    time.sleep(min(max(waited / 8, _MIN_NAP), _MAX_NAP))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep until woken, for at most `seconds`; return at once if the word does not hold `value`.

    It may also return early without a reason. The word is one of 32 bits.
    """
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    _failed(_sleeping(_number, address, _WAIT, value, ctypes.addressof(timeout)))


def wake(address: int) -> None:
    """Wake all threads that wait for the word at `address`, after it was changed."""
    if (answer := _holding(_number, address, _WAKE, _ALL, None)) < 0:
        _failed(answer)


def _failed(answer: int) -> None:
    global available
    code = 0 if answer >= 0 else ctypes.get_errno()
    if code in _REFUSED:
        # In a sandbox. From now on whoever waits looks from time to time.
        available = False
    elif code not in _WOKEN:
        raise OSError(code, f"futex: {os.strerror(code)}")


def _syscall(library: type[ctypes.CDLL]) -> ctypes._NamedFuncPointer:
    function = library(None, use_errno=True).syscall
    long, pointer = ctypes.c_long, ctypes.c_void_p
    function.argtypes, function.restype = [long, pointer, long, long, pointer], long
    return function


_number = _NUMBERS.get(platform.machine(), 0)
# Whether there are futexes: not on other systems, in a 32-bit process, or if they are forbidden.
available = False
if sys.platform == "linux" and sys.maxsize > 2**32 and _number:
    with contextlib.suppress(OSError, AttributeError):
        _sleeping = _syscall(ctypes.CDLL)
        # Waking is quick, and keeps the interpreter's lock (PyDLL): once released, it could be with
        # another thread for milliseconds.
        _holding = _syscall(ctypes.PyDLL)
        available = True
        # A call that returns at once, to find out whether futexes are forbidden.
        _word = ctypes.c_uint32(0)
        wait(ctypes.addressof(_word), 1, 0.0)
