"""Ranks that are threads of one process, for tests, notebooks and debugging.

CPU tensors are carried, and those of one GPU, which are ordered by events between streams.
"""

from __future__ import annotations

import mmap
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from collectives.errors import CollectiveTimeoutError, TransportError
from collectives.stall import Stall
from collectives.transport.base import Messages, Transport
from collectives.transport.shared_memory.symmetric_memory import (
    SymmetricMemory,
    symmetric_memory_bytes,
)

# Seconds after which a wait checks for interrupts, ranks that have ended and the timeout.
_POLL = 0.05
# Linux's number, which Python names from 3.13 on.
_NORESERVE = 0x4000


class _Sent:
    """A tensor that was sent: the receiver copies it and then lets the sender go on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # `taken` is for the host; on CUDA the receiver's stream waits for `ready` before the copy,
        # and the sender's for `copied` after it.
        self.taken = threading.Event()
        self.ready = _record(tensor)
        self.copied: torch.cuda.Event | None = None


class ThreadWorld:
    """The mailboxes that `size` ThreadTransports share.

    Attributes:
        boxes: The mailboxes by sender and receiver.
        memory: The ranks' symmetric memory, zeros at first.
        ended: The ranks that have ended, so that others fail at once instead of waiting.
        aborted: The reasons of those that have aborted, by rank.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[_Sent]] = {
            (source, target): queue.SimpleQueue()
            for source in range(size)
            for target in range(size)
        }
        self.memory = memoryview(_memory(symmetric_memory_bytes(size)))
        self.ended: set[int] = set()
        self.aborted: dict[int, str] = {}
        # Worlds for which not all of their ranks have asked yet, with the number that has.
        self._parts: dict[tuple[tuple[int, ...], int], tuple[ThreadWorld, int]] = {}
        self._lock = threading.Lock()

    def transport(self, rank: int) -> ThreadTransport:
        """Return the transport of one rank."""
        return ThreadTransport(self, rank)

    def part(self, ranks: tuple[int, ...], number: int) -> ThreadWorld:
        """Return the `number`th world of these ranks, the same to all; each of them asks once."""
        key = ranks, number
        with self._lock:
            if key not in self._parts:
                self._parts[key] = ThreadWorld(len(ranks)), 0
            world, asked = self._parts.pop(key)
            # Forgotten when the last rank has it, so that closed groups do not stay in memory.
            if asked + 1 < len(ranks):
                self._parts[key] = world, asked + 1
            return world


class ThreadTransport(Transport):
    """One rank's end of a ThreadWorld."""

    symmetric_memory: SymmetricMemory | None = None

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._made: Counter[tuple[int, ...]] = Counter()
        # One core, so that nobody spins: threads share the interpreter's lock, and one that spins
        # keeps the others from running.
        self.symmetric_memory = SymmetricMemory(world.memory, rank, world.size, self, cores=[0])

    def check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensor is on {device}; the threads transport carries cpu and cuda")

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        posted: list[tuple[int, _Sent]] = []
        for peer, tensor in sends:
            if tensor.numel():
                sent = _Sent(tensor)
                self._world.boxes[self.rank, peer].put(sent)
                posted.append((peer, sent))
        for peer, tensor in recvs:
            if tensor.numel():
                self._receive(peer, tensor, step, deadline, timeout)
        for peer, sent in posted:
            stall = self._stall(peer, step, timeout)
            while not sent.taken.wait(_POLL):
                self._check_waiting(peer, step, deadline, timeout)
                stall.check()
            stall.end()
            if sent.copied is not None:
                torch.cuda.current_stream(sent.tensor.device).wait_event(sent.copied)

    def _receive(
        self, peer: int, tensor: torch.Tensor, step: str, deadline: float, timeout: float
    ) -> None:
        box, stall = self._world.boxes[peer, self.rank], self._stall(peer, step, timeout)
        while True:
            try:
                sent = box.get(timeout=_POLL)
                break
            except queue.Empty:
                self._check_waiting(peer, step, deadline, timeout)
                stall.check()
        stall.end()
        self.check_interrupt(step)
        if sent.tensor.numel() != tensor.numel():
            raise TransportError(
                f"rank {self.name(peer)} sent {sent.tensor.numel()} elements in {step} where "
                f"{tensor.numel()} were expected"
            )
        if sent.ready is not None:
            torch.cuda.current_stream(tensor.device).wait_event(sent.ready)
        tensor.copy_(sent.tensor)
        sent.copied = _record(tensor)
        sent.taken.set()

    def _stall(self, peer: int, step: str, timeout: float) -> Stall:
        return Stall(self.name(self.rank), step, timeout, lambda: self.named([peer]))

    def _check_waiting(self, peer: int, step: str, deadline: float, timeout: float) -> None:
        self.check_interrupt(step)
        if peer in self._world.ended:
            raise CollectiveTimeoutError(f"{self.me} cannot go on in {step}: {self.why_gone(peer)}")
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"{self.me} waited {timeout:g} s for {self.named([peer])} in {step}"
            )

    def gone(self, peers: Collection[int] | None = None) -> int | None:
        self.check_interrupt("a wait for all ranks")
        return next((r for r in sorted(self._world.ended) if peers is None or r in peers), None)

    def why_gone(self, peer: int) -> str:
        why = self._world.aborted.get(peer)
        return f"rank {self.name(peer)} has ended" + (f": {why}" if why else "")

    def abort(self, reason: str) -> None:
        """Withdraw from the call, and make the ranks that wait for this one fail at once."""
        # The reason first: whoever finds this rank among `ended` looks it up.
        self._world.aborted[self.rank] = reason
        self._world.ended.add(self.rank)
        if self.symmetric_memory is not None:
            self.symmetric_memory.withdraw()

    def split(self, ranks: Sequence[int], timeout: float) -> ThreadTransport:
        members = tuple(ranks)
        self._made[members] += 1
        world = self._world.part(members, self._made[members])
        part = world.transport(members.index(self.rank))
        part.names = tuple(map(self.name, members))
        return part

    def close(self) -> None:
        """Tell the other ranks that this one has ended."""
        self._world.ended.add(self.rank)


def _memory(nbytes: int) -> mmap.mmap:
    """Return zeros that threads share; pages to which nothing is written take no memory."""
    if sys.platform != "linux":
        return mmap.mmap(-1, nbytes)
    # Otherwise Linux refuses more than the machine has, such as a few hundred ranks' buffers.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)


def _record(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Record an event after the work queued so far on the current stream; None for a CPU tensor."""
    if tensor.device.type != "cuda":
        return None
    return torch.cuda.current_stream(tensor.device).record_event()
