"""Sleep until another rank changes a word of shared memory: Linux's futex(2), by the C library.

Without futexes a waiting rank would poll the word. Each poll may take a core from the rank that it
waits for, and it would notice the change late, by half an interval on average.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
import time

# The number of the system call futex on each processor: the C library has no function for it. Then
# its operations, without FUTEX_PRIVATE_FLAG, since the word is shared between processes.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
# Errors if futexes are forbidden, and results of a wait that has ended normally.
_REFUSED = (errno.ENOSYS, errno.EPERM)
_WOKEN = (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)

# A waiting rank checks so many times before it sleeps, for some 20 us in all, and yields the
# processor after each check. Then it sleeps for at most CHECK_SECONDS at a time, to check whether
# some rank has ended without waking it.
SPINS, CHECK_SECONDS = 30, 20e-3
# The shortest and the longest sleep without futexes, in seconds.
_MIN_NAP, _MAX_NAP = 20e-6, 1e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def nap(waited: float) -> None:
    """Sleep for a while in a wait without futexes that has lasted `waited` seconds.

    The sleep is an eighth of that time, within limits, so that the delay stays in proportion.
    """
    time.sleep(min(max(waited / 8, _MIN_NAP), _MAX_NAP))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep until woken, for at most `seconds`; return at once if the word does not hold `value`.

    It may also return early without a reason. The word has 32 bits.
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
        # A sandbox forbids futexes: from now on waiting ranks poll.
        available = False
    elif code not in _WOKEN:
        raise OSError(code, f"futex: {os.strerror(code)}")


def _syscall(library: type[ctypes.CDLL]) -> ctypes._NamedFuncPointer:
    function = library(None, use_errno=True).syscall
    long, pointer = ctypes.c_long, ctypes.c_void_p
    function.argtypes, function.restype = [long, pointer, long, long, pointer], long
    return function


_number = _NUMBERS.get(platform.machine(), 0)
# False on systems other than Linux, in a 32-bit process, or if futexes are forbidden.
available = False
if sys.platform == "linux" and sys.maxsize > 2**32 and _number:
    with contextlib.suppress(OSError, AttributeError):
        _sleeping = _syscall(ctypes.CDLL)
        # Waking is quick, so it keeps the interpreter's lock (PyDLL): if released, another thread
        # could hold the lock for milliseconds.
        _holding = _syscall(ctypes.PyDLL)
        available = True
        # A call that returns at once, to find out whether futexes are forbidden.
        _word = ctypes.c_uint32(0)
        wait(ctypes.addressof(_word), 1, 0.0)
