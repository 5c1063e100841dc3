"""The memory that ranks of one host share: its layout, and how processes map it.

It holds a page for each rank, the symmetric memory, and the channels of messages. Between processes
it is a memfd, which vanishes with the last process that maps it and is not limited by /dev/shm. The
host's first rank makes it; the others open it through /proc, as processes of one user and one pid
namespace may.
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
    """Return the bytes that `size` ranks of a host share; pages never written to take no memory."""
    return size * PAGE_BYTES + symmetric_memory_bytes(size) + channels_bytes(size)


class Shared(NamedTuple):
    """The memory that ranks of this host share.

    Attributes:
        memory: The memory; None if this rank shares memory with no other rank.
        pidfds: The ranks of the other processes that share it, by pidfd.
        near: For each rank, the ranks that share its memory, itself included, in ascending order.
    """

    memory: mmap.mmap | None
    pidfds: Mapping[int, int]
    near: Sequence[Sequence[int]]


def share_memory(rank: int, size: int, place: Any, gather: Callable[[Any], list[Any]]) -> Shared:
    """Map the memory that the ranks of each host share; a collective.

    place: Equal on ranks of one host; None for ranks that cannot share memory.
    gather: Returns all ranks' arguments, by rank; all ranks call it equally often.
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
                # Map the memory that the host's first rank has made.
                _, pid, made = said[hosts[rank][0]]
                memory = _map(pid, made, nbytes)
                for peer in hosts[rank]:
                    if peer != rank:
                        pidfds[os.pidfd_open(said[peer][1])] = peer
        complete = memory is not None and len(pidfds) == len(hosts[rank]) - 1
        mapped = gather(complete)
    # Either all ranks of a host share memory or none of them.
    near = [host if all(mapped[r] for r in host) else [r] for r, host in enumerate(hosts)]
    if len(near[rank]) == 1:
        for fd in pidfds:
            os.close(fd)
        return Shared(None, {}, near)
    return Shared(memory, pidfds, near)


def host_place() -> list[Any] | None:
    """Return a value that is equal on ranks that can share memory; None if this rank cannot."""
    with suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Ranks in different network namespaces count as different hosts.
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        return [kernel, *spaces, os.geteuid(), futex.available]
    return None


def _map(pid: int, descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory behind a descriptor of another process; OSError if that fails."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # If it were smaller, an access beyond its end would kill the process (SIGBUS).
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {pid} has other memory")
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)
