"""Messages through memory that a host's ranks share, and over gloo to ranks of other hosts.

The ranks of a host are processes or threads. A waiting rank sleeps on its doorbell, a futex that a
peer changes after it has written or taken a chunk. Without futexes it sleeps for short intervals. A
pidfd shows that a process has ended; before leaving, a rank writes that and its reason to its page.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType

import torch

from collectives.errors import CollectiveTimeoutError, TransportError, describe
from collectives.stall import Stall, warning_seconds
from collectives.transport import futex
from collectives.transport.base import Message, Messages, Transport, gather_objects
from collectives.transport.channels import Channel, Incoming, LengthsDiffer, Outgoing
from collectives.transport.host_memory import PAGE_BYTES, Shared, host_memory_bytes, share_memory
from collectives.transport.symmetric_memory import (
    SymmetricMemory,
    symmetric_memory_bytes,
)

# A rank's page: whether it has left, its doorbell and whether it sleeps, each in a cache line; then
# the reason for leaving in UTF-8, ended by a zero.
_LEFT, _DOORBELL, _ASLEEP, _REASON = 0, 64, 128, 192
_CLOSED, _ABORTED = 1, 2
# A Stall is made only after a wait of this length: shorter waits need no warning.
_FIRST_SECONDS = 0.5


class HostTransport(Transport):
    """Messages of CPU tensors through shared memory, and over gloo to ranks that do not share it.

    After a failed exchange it is unusable, and the other ranks that share the memory get the
    reason, so that they fail with it at once instead of waiting. In a forked child it is unusable;
    the parent process can go on using it.

    Args:
        memory: The shared memory, `host_memory_bytes` long, zeros at first.
        rank: This rank.
        size: How many ranks there are.
        near: The ranks that share the memory, in ascending order.
        names: As in `Transport`.
        pidfds: The ranks of the other processes, by pidfd; empty for threads.
        far: The transport that carries messages to all other ranks.
    """

    symmetric_memory: SymmetricMemory | None = None

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        *,
        near: Sequence[int],
        names: Sequence[int] = (),
        pidfds: Mapping[int, int] = MappingProxyType({}),
        far: Transport | None = None,
    ) -> None:
        self.rank, self.size, self.names = rank, size, names
        self.process_group = None if far is None else far.process_group
        self.near = tuple(near)
        self._far = far
        self._unusable = ""
        self._place, count = self.near.index(rank), len(self.near)
        whole = memoryview(memory)
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._pages, self._doorbells = {}, {}
        for place, peer in enumerate(self.near):
            self._pages[peer] = whole[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
            self._doorbells[peer] = address + place * PAGE_BYTES + _DOORBELL
        channels_at = count * PAGE_BYTES + symmetric_memory_bytes(count)
        self._channels, self._channels_at = whole[channels_at:], address + channels_at
        self._out: dict[int, Channel] = {}
        self._in: dict[int, Channel] = {}
        self._lock = threading.Lock()
        # Threads do not spin: they share the interpreter's lock, and a thread that spins keeps the
        # others from running.
        cores = _cores() if pidfds else [0]
        self._spins = futex.SPINS if len(cores) >= count else 0
        self._pidfds = dict(pidfds)
        if count == size:
            block = whole[count * PAGE_BYTES : channels_at]
            self.symmetric_memory = SymmetricMemory(block, rank, size, self, cores=cores)
        _transports.add(self)

    def __repr__(self) -> str:
        count = self.size - len(self.near)
        also = f", {self._far!r} to {count}" if count else ""
        return f"HostTransport(shared memory to {len(self.near) - 1}{also})"

    def check_device(self, device: torch.device) -> None:
        if self._far is not None and device.type != "cpu":
            self._far.check_device(device)

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        beyond: tuple[list[Message], list[Message]] = ([], [])
        active: dict[Channel, None] = {}
        try:
            self._check_usable(step)
            for sending, messages in ((True, sends), (False, recvs)):
                for message in messages:
                    peer, tensor = message
                    if peer not in self._pages:
                        beyond[not sending].append(message)
                    elif nbytes := tensor.nbytes:
                        # A rank that has left receives nothing more, but its messages are there.
                        if sending and self._pages[peer][_LEFT]:
                            self._raise_gone(peer, step)
                        channel = self._channel(sending, peer)
                        channel.queue.append((tensor.data_ptr(), nbytes))
                        active[channel] = None
            arrive = self._far.post(*beyond, step, timeout) if self._far and any(beyond) else None
            if active:
                self._run(list(active), step, timeout)
            if arrive is not None:
                arrive()
        except BaseException as error:
            self.abort(describe(error))
            raise

    def _channel(self, sending: bool, peer: int) -> Channel:
        """Return this rank's end of a channel, which is made at its first use."""
        channels = self._out if sending else self._in
        channel = channels.get(peer)
        if channel is None:
            pair = self._place, self.near.index(peer)
            channel = channels[peer] = (Outgoing if sending else Incoming)(
                self._channels,
                self._channels_at,
                len(self.near),
                pair if sending else pair[::-1],
                peer,
                self._fence,
                partial(self._wake, peer),
            )
        return channel

    def _run(self, channels: list[Channel], step: str, timeout: float) -> None:
        """Advance the channels until no message is under way."""
        start = since = time.monotonic()
        stall: Stall | None = None

        def late() -> str:
            return self.named(sorted({channel.peer for channel in channels}))

        while True:
            try:
                moved = [channel for channel in channels if channel.advance()]
            except LengthsDiffer as differ:
                peer, sent, expected = differ.args
                raise TransportError(
                    f"{self.named([peer])} sent {sent} bytes in {step} where {expected} were "
                    "expected"
                ) from None
            channels = [channel for channel in channels if channel.queue]
            if not channels:
                break
            if moved or self._spin(channels):
                since = 0.0
                continue
            now = time.monotonic()
            if not since:
                since = now
                if stall is not None:
                    stall.restart()
            elif now > since:
                self._check_peers(channels, step)
            if now - start >= timeout:
                raise CollectiveTimeoutError(
                    f"{self.me} got no answer from {late()} in {step} within {timeout:.3g} s"
                )
            if now - since >= min(_FIRST_SECONDS, warning_seconds()):
                stall = stall or Stall(self.name(self.rank), step, timeout, late, since)
                stall.check()
            self._sleep(channels, now - since, start + timeout - now)

    def _check_peers(self, channels: Sequence[Channel], step: str) -> None:
        """Raise if this rank was interrupted, or if one that it needs is gone."""
        self._check_usable(step)
        gone = self.gone({channel.peer for channel in channels})
        if gone is None:
            # A rank that aborts ends the group, even if this rank needs no message from it.
            gone = next((r for r, page in self._pages.items() if page[_LEFT] == _ABORTED), None)
        # It may have written its last chunk since this rank last checked.
        if gone is not None and not any(channel.ready() for channel in channels):
            self._raise_gone(gone, step)

    def _raise_gone(self, peer: int, step: str) -> None:
        raise CollectiveTimeoutError(
            f"{self.me} got no answer from {self.named([peer])} in {step}: {self.why_gone(peer)}"
        )

    def _spin(self, channels: Sequence[Channel]) -> bool:
        """Return whether a chunk can be moved; wait for one for some microseconds."""
        for _ in range(self._spins):
            os.sched_yield()
            if any(channel.ready() for channel in channels):
                return True
        return False

    def _sleep(self, channels: Sequence[Channel], waited: float, left: float) -> None:
        """Sleep until a peer rings, or for some time up to `left` seconds."""
        mine = self._pages.get(self.rank)
        if mine is None:
            # Another thread has closed the transport meanwhile, which the next check reports.
            return
        if not futex.available:
            futex.nap(waited)
            return
        number = int.from_bytes(mine[_DOORBELL : _DOORBELL + 4], sys.byteorder)
        mine[_ASLEEP] = 1
        # A peer that rings after this changes the number. If it moved a chunk before it could see
        # that this rank sleeps, the check below sees the chunk.
        self._fence()
        if not any(channel.ready() for channel in channels):
            futex.wait(self._doorbells[self.rank], number, min(futex.CHECK_SECONDS, left))
        mine[_ASLEEP] = 0

    def _wake(self, peer: int) -> None:
        """Ring a rank's doorbell if it sleeps."""
        page = self._pages.get(peer)
        if page is not None and page[_ASLEEP] and futex.available:
            number = int.from_bytes(page[_DOORBELL : _DOORBELL + 4], sys.byteorder) + 1
            page[_DOORBELL : _DOORBELL + 4] = (number & 0xFFFFFFFF).to_bytes(4, sys.byteorder)
            futex.wake(self._doorbells[peer])

    def _fence(self) -> None:
        """Keep the processor from moving memory accesses across this, as in symmetric memory."""
        with self._lock:
            pass
        with self._lock:
            pass

    def _check_usable(self, step: str) -> None:
        if self._unusable:
            raise TransportError(f"this transport cannot be used in {step}: {self._unusable}")
        if self._interrupted:
            self.check_interrupt(step)

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        """Return a rank of this host that has left or ended: `Transport.gone`."""
        self._check_usable("a wait for all ranks")
        others = [r for r in self.near if r != self.rank and (peers is None or r in peers)]
        pages, poll = self._pages, select.poll()
        for fd, peer in self._pidfds.items():
            if peer in others:
                poll.register(fd, select.POLLIN)
        left = next((r for r in others if r in pages and pages[r][_LEFT]), None)
        return next((self._pidfds[fd] for fd, _ in poll.poll(0)), None) if left is None else left

    def why_gone(self, peer: int) -> str:
        page = self._pages.get(peer)
        said = b"" if page is None else bytes(page[_REASON:]).partition(b"\0")[0]
        return said.decode(errors="replace") or super().why_gone(peer)

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        """Split `far`; ranks that share memory here share new memory in the new transport."""
        assert self._far is not None
        gather = partial(gather_objects, transport=self, timeout=timeout, ranks=ranks)
        shared = share_memory(ranks.index(self.rank), len(ranks), self.near[0], gather)
        return on_host(self._far.split(ranks, timeout), shared)

    def abort(self, reason: str) -> None:
        """Give the reason to the other ranks and become unusable."""
        memory = self.symmetric_memory
        if memory is not None:
            memory.withdraw()
        self._leave(_ABORTED, reason)
        if self._far is not None:
            self._far.abort(reason)

    def close(self) -> None:
        """Tell the other ranks that this one has left. Messages sent before still arrive."""
        with ExitStack() as stack:
            if self._far is not None:
                stack.callback(self._far.close)
            self._leave(_CLOSED, "")
            # The memory is unmapped when the last of these references is gone.
            self.symmetric_memory, self._channels = None, memoryview(b"")
            self._pages, self._out, self._in = {}, {}, {}

    def _leave(self, how: int, reason: str) -> None:
        """Tell the other ranks that this one has left, unless it has done so or was forked."""
        if self._unusable:
            return
        mine, said = self._pages[self.rank], reason.encode()[: PAGE_BYTES - _REASON - 1]
        mine[_REASON : _REASON + len(said)] = said
        self._fence()
        mine[_LEFT] = how
        self._fence()
        for peer in self.near:
            self._wake(peer)
        # Last: if a signal handler raises before this line, the next call tells the other ranks.
        self.symmetric_memory, self._unusable = None, reason or f"{self.me} has closed it"
        pidfds, self._pidfds = self._pidfds, {}
        for fd in pidfds:
            os.close(fd)


def on_host(far: Transport, shared: Shared) -> Transport:
    """Return a transport that uses the shared memory, or `far` if no ranks share any."""
    if max(map(len, shared.near)) == 1:
        return far
    # All ranks use this class, even those without shared memory: `split` is a collective.
    return HostTransport(
        shared.memory or mmap.mmap(-1, host_memory_bytes(1)),
        far.rank,
        far.size,
        near=shared.near[far.rank],
        names=far.names,
        pidfds=shared.pidfds,
        far=far,
    )


def _cores() -> Collection[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


# All transports of this process, for the hook that runs after a fork.
_transports: weakref.WeakSet[HostTransport] = weakref.WeakSet()


def _forked() -> None:
    for transport in list(_transports):
        transport.symmetric_memory = None
        transport._unusable = "this process was forked from a rank; only the rank itself can use it"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
