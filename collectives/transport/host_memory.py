"""The memory that ranks of one host share: how its bytes are divided, and how processes map it.

For processes it is a memfd, which vanishes with the last process that maps it, and which /dev/shm
does not limit. The host's first rank makes it; the others open it through /proc, as processes of
one user and one pid namespace may. It holds a page of each rank, the symmetric memory, and the
channels of messages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from collectives.transport import futex
from collectives.transport.channels import channels_bytes
from collectives.transport.symmetric_memory import symmetric_memory_bytes

PAGE_BYTES = 4096


def host_memory_bytes(size: int) -> int:
    """Return how much memory `size` ranks of a host share; pages that none writes to take none."""
    return size * PAGE_BYTES + symmetric_memory_bytes(size) + channels_bytes(size)


class Shared(NamedTuple):
    """The memory that ranks of this host share.

    Attributes:
        memory: The memory; None if this rank shares it with no other one.
        pidfds: A descriptor of each other process that shares it, and its rank.
        near: By rank, the ranks with which it shares memory, in ascending order, and itself.
    """

    memory: mmap.mmap | None
    pidfds: Mapping[int, int]
    near: Sequence[Sequence[int]]


def share_memory(rank: int, size: int, place: Any, gather: Callable[[Any], list[Any]]) -> Shared:
    """Map the memory that the ranks of each host share; a collective.

    place: Equal on ranks of one host; None for a rank that cannot share memory.
    gather: Returns a value of each rank, by rank; all ranks call it alike.
    """
    nbytes, descriptor, memory = host_memory_bytes(size), -1, None
    pidfds: dict[int, int] = {}
    with ExitStack() as opened:
        with suppress(OSError, AttributeError):
            descriptor = os.memfd_create("adasum-host")
            opened.callback(os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
        said = gather([place, os.getpid(), descriptor])
        places = [place for place, *_ in said]
        hosts = [[r for r in range(size) if places[r] == place] for place in places]
        if places[rank] is not None and len(hosts[rank]) > 1:
            with suppress(OSError):
                # The one that the host's first rank has made.
                _, pid, made = said[hosts[rank][0]]
                memory = _map(pid, made, nbytes)
                for peer in hosts[rank]:
                    if peer != rank:
                        pidfds[os.pidfd_open(said[peer][1])] = peer
        complete = memory is not None and len(pidfds) == len(hosts[rank]) - 1
        mapped = gather(complete)
    # On all ranks of a host or on none.
    near = [host if all(mapped[r] for r in host) else [r] for r, host in enumerate(hosts)]
    if len(near[rank]) == 1:
        for fd in pidfds:
            os.close(fd)
        return Shared(None, {}, near)
    return Shared(memory, pidfds, near)


def host_place() -> list[Any] | None:
    """Return what ranks have in common that can share memory; None for a rank that never can."""
    with suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Ranks with networks of their own count as hosts of their own.
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        return [kernel, *spaces, os.geteuid(), futex.available]
    return None


def _map(pid: int, descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory of a process's descriptor; OSError if it cannot be had."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # To touch pages beyond the end of a smaller one would end the process (SIGBUS).
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {pid} has other memory")
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)
