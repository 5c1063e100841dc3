"""Let SIGUSR1 write this process's file, also while the rank waits in C, as in gloo.

There no Python handler would run before the wait ends. So the handler is faulthandler's, which at
once writes the stack of the thread that got the signal to a pipe. A thread that reads the pipe
writes the file.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A stack comes in many small writes, and is complete after a pause.
_PAUSE_SECONDS, _MAX_BYTES = 0.05, 1 << 16
_installed = False


def install(write: Callable[[list[str]], object]) -> None:
    """Have SIGUSR1 call `write` with the lines of the stack, unless the program handles it.

    Only the main thread can install a handler.
    """
    global _installed
    number, main = signal.SIGUSR1, threading.current_thread() is threading.main_thread()
    used = signal.getsignal(number) is not signal.SIG_DFL or _is_caught(number)
    if _installed or not main or used:
        return
    # Without a descriptor or a thread left, the signal keeps its default.
    with suppress(OSError, RuntimeError):
        read, written = os.pipe()
        # The handler must not wait for the thread that reads.
        os.set_blocking(written, False)
        threading.Thread(target=_serve, args=(read, write), daemon=True).start()
        faulthandler.register(number, file=written, all_threads=False)
        os.register_at_fork(after_in_child=lambda: _forget(written))
        _installed = True


def _is_caught(number: int) -> bool:
    """Return whether a handler in C, which Python does not know, handles a signal."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _forget(written: int) -> None:
    """In a forked child: give the signal its default, and leave the parent's thread alone."""
    faulthandler.unregister(signal.SIGUSR1)
    with suppress(OSError):
        os.close(written)


def _serve(read: int, write: Callable[[list[str]], object]) -> None:
    """Call `write` each time that a stack comes through the pipe."""
    while stack := os.read(read, _MAX_BYTES):
        while select.select([read], [], [], _PAUSE_SECONDS)[0] and len(stack) < _MAX_BYTES:
            stack += os.read(read, _MAX_BYTES)
        write(stack.decode(errors="replace").splitlines())
