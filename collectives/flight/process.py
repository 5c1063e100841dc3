"""A process that is a rank: its recorder, and the file that it writes on SIGUSR1.

The signal is for a rank that waits in C, as in gloo, where no handler of Python's would run before
the wait ends. So the handler is faulthandler's, which at once writes the stack of the thread that
got the signal to a pipe; a thread that reads the pipe writes the file.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from collectives.flight.dump import dump_all, set_aside
from collectives.flight.ranks import compact
from collectives.flight.recorder import GroupRecord, folder, of_process

_logger = logging.getLogger(__name__)
# A stack comes in many small writes; after a pause of this length it is whole.
_PAUSE_SECONDS, _MOST_BYTES = 0.05, 1 << 16
_NAME_CHARACTERS = 60
_installed = False


def begin(record: GroupRecord, kind: str, ranks: Sequence[int]) -> None:
    """Record a group as one of this process, and have SIGUSR1 write the file.

    kind: The function that made it. ranks: The members' numbers in torch.distributed.
    """
    if not record.on:
        return
    name = kind
    if kind != "init":
        name = f"process group {compact(ranks)}"
        if len(name) > _NAME_CHARACTERS:
            name = f"{name[:_NAME_CHARACTERS]}... {zlib.crc32(repr(list(ranks)).encode()):08x}"
    first = of_process.rank is None
    record.attach(of_process, name, ranks)
    if first:
        set_aside(of_process)
    if len(ranks) > 1:
        _install()


def _install() -> None:
    """Handle SIGUSR1, in the main thread and unless the program or a library does."""
    global _installed
    number = getattr(signal, "SIGUSR1", None)
    main = threading.current_thread() is threading.main_thread()
    if _installed or not main or number is None or folder() is None:
        return
    if signal.getsignal(number) is not signal.SIG_DFL or _is_caught(number):
        return
    read, written = os.pipe()
    # A handler must not wait for the thread that reads.
    os.set_blocking(written, False)
    try:
        threading.Thread(target=_serve, args=(read,), name="adasum-flight", daemon=True).start()
    except RuntimeError:
        # The system has no thread left.
        os.close(read)
        os.close(written)
        return
    faulthandler.register(number, file=written, all_threads=False)
    os.register_at_fork(after_in_child=lambda: _forget(written))
    _installed = True


def _is_caught(number: int) -> bool:
    """Return whether a handler in C, which Python does not know of, handles a signal."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _forget(written: int) -> None:
    """In a forked child: let the signal end it again, and leave the parent's thread alone."""
    faulthandler.unregister(signal.SIGUSR1)
    with suppress(OSError):
        os.close(written)


def _serve(read: int) -> None:
    """Write the file each time that a stack comes through the pipe."""
    while stack := os.read(read, _MOST_BYTES):
        while select.select([read], [], [], _PAUSE_SECONDS)[0] and len(stack) < _MOST_BYTES:
            stack += os.read(read, _MOST_BYTES)
        for path in dump_all("SIGUSR1", stack=stack.decode(errors="replace").splitlines()):
            _logger.warning("SIGUSR1: what this rank did last is in %s", path)
