"""Messages over links: through shared memory to ranks of this host, over TCP to others. CPU only.

`rendezvous` finds the ranks and opens the links, `shm_link` and `tcp_link` are one each; `hybrid`
adds a way to the ranks that no link leads to, and for other devices.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch

from collectives.errors import CollectiveTimeoutError, TransportError, words
from collectives.transport.base import Message, Transport
from collectives.transport.connections.connection import Bytes, Link, PeerGone
from collectives.transport.connections.shm import ShmLink
from collectives.transport.shared_memory.symmetric_memory import RanksDiffer, SymmetricMemory

# Looks at the sockets before sleeping, some 20 us in all: a partner that works in step answers
# within that, and its answer then costs neither side a wake-up.
_LOOKS = 10
# After such a wait in a call with a code all peers are told which call it is. Twice as long each
# time, up to a part of the time limit: probes that a peer has no reason to read remain.
_PROBE_SECONDS = 0.05
_PROBE_PART = 0.25
# A day; poll counts milliseconds in 32 bits.
_LONGEST_SECONDS = 86400.0
# What telling the peers the cause may take, all of them together.
_FAREWELL_SECONDS = 0.5
# Of those that numpy has, too: its view costs a third of torch's.
_NUMPYS = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8))


class LinkTransport(Transport):
    """Point-to-point messages over `links`, by peer.

    After a failed exchange it cannot be used, and the peers are told the cause, so that they fail
    with it at once instead of waiting. In a forked child it cannot be used; the parent's is not
    touched by that.

    memory: what the symmetric memory of all ranks lies in, where there are links to all.
    symmetric_memory: that, until the transport cannot be used any more.
    """

    symmetric_memory: SymmetricMemory | None = None

    def __init__(
        self, rank: int, size: int, links: Mapping[int, Link], memory: memoryview | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.peers = frozenset(links)
        # Those through memory.
        self.sharing = frozenset(p for p, link in links.items() if isinstance(link, ShmLink))
        self.carries_codes = len(links) == size - 1
        self._links = dict(links)
        self._unusable = ""
        # With more ranks than cores a rank that looks again keeps its partner from working.
        cores = _cores()
        near = sum(link.near for link in links.values())
        self._looks = _LOOKS if near < len(cores) else 0
        self._patience = _PROBE_SECONDS
        if memory is not None:
            self.symmetric_memory = SymmetricMemory(memory, rank, size, self, cores=cores)
        self._hang_ups = select.poll()
        for link in self._links.values():
            self._hang_ups.register(link, 0)
        _transports.add(self)

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"tensor is on {device}; links carry cpu, move it there")

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        step: str,
        timeout: float,
        code: int = 0,
    ) -> None:
        if self._unusable:
            raise TransportError(f"the links cannot be used in {step}: {self._unusable}")
        active: dict[int, Link] = {}
        with self._aborting(step):
            for peer, tensor in sends:
                if tensor.numel():
                    active[peer] = link = self._link(peer, step)
                    link.send(_bytes(tensor), code)
            for peer, tensor in recvs:
                if tensor.numel():
                    active[peer] = link = self._link(peer, step)
                    link.receive(_bytes(tensor), code)
            self._run(list(active.values()), step, timeout, code)

    def flush(self, step: str, timeout: float) -> None:
        if self._unusable:
            raise TransportError(f"the links cannot be used in {step}: {self._unusable}")
        links = list(self._links.values())
        with self._aborting(step):
            for link in links:
                link.begin_flush()
            self._run(links, step, timeout)
            for link in links:
                link.end_flush()
            self._patience = _PROBE_SECONDS

    @contextmanager
    def _aborting(self, step: str) -> Iterator[None]:
        """Whatever is raised within is the end, except that the ranks differ."""
        try:
            yield
        except RanksDiffer:
            raise
        except PeerGone as gone:
            self.abort(str(gone))
            raise CollectiveTimeoutError(
                f"rank {self.rank} got no answer from rank {gone.peer} in {step}: {gone}"
            ) from None
        except BaseException as error:
            self.abort(words(error))
            raise

    def _link(self, peer: int, step: str) -> Link:
        if peer not in self._links:
            raise TransportError(f"rank {self.rank} has no link to rank {peer}, needed in {step}")
        return self._links[peer]

    def _run(self, links: list[Link], step: str, timeout: float, code: int = 0) -> None:
        """Advance the links until none is busy."""
        deadline = time.monotonic() + timeout
        looks, probing = self._looks, code != 0
        while links:
            moved = False
            for link in links:
                moved = link.advance() or moved
            links = [link for link in links if link.busy]
            if moved or not links:
                looks = self._looks
                continue
            if looks:
                looks -= 1
                continue
            nap = min(self._patience, _PROBE_PART * timeout) if probing else math.inf
            if _wait(links, deadline, nap):
                continue
            if time.monotonic() >= deadline:
                late = ", ".join(f"rank {link.peer}" for link in links)
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from {late} in {step} within {timeout:.3g} s"
                )
            if probing:
                probing = False
                self._patience = min(2 * self._patience, _PROBE_PART * timeout)
                for link in self._links.values():
                    link.probe(code)

    def gone(self) -> int | None:
        """A peer whose end is closed, if any."""
        if self._unusable:
            raise TransportError(f"the links cannot be used: {self._unusable}")
        closed = {fd for fd, _ in self._hang_ups.poll(0)}
        return next((p for p, link in self._links.items() if link.fileno() in closed), None)

    def last_words(self, peer: int) -> str:
        """Why the end of a peer that is gone was closed."""
        return self._links[peer].last_words()

    def split(self, ranks: Sequence[int], timeout: float) -> NoReturn:
        raise TransportError("links alone cannot be split: HybridTransport opens new ones")

    def abort(self, reason: str) -> None:
        """Close every link and tell the peers why; what is under way here is lost."""
        self._unusable = self._unusable or reason
        if self.symmetric_memory is not None:
            self.symmetric_memory.withdraw()
        self.symmetric_memory = None
        links = list(self._links.values())
        deadline = time.monotonic() + _FAREWELL_SECONDS
        try:
            while links := [link for link in links if not link.part(reason)]:
                if not _wait(links, deadline):
                    break
        finally:
            for link in self._links.values():
                link.close()

    def close(self) -> None:
        """Close every link. What was sent before still arrives."""
        self._unusable = self._unusable or f"rank {self.rank} has closed it"
        self.symmetric_memory = None
        for link in self._links.values():
            link.close()

    def forsake(self) -> None:
        """In a forked child: let go of the parent's sockets, which would outlive the parent."""
        self._unusable = "this process was forked from a rank; only the rank itself can use it"
        self.symmetric_memory = None
        for link in self._links.values():
            link.forsake()


def _cores() -> set[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _wait(links: Sequence[Link], deadline: float, nap: float = math.inf) -> bool:
    """Sleep until a link can go on, which it returns, to the deadline or for `nap` seconds."""
    left = min(deadline - time.monotonic(), nap, _LONGEST_SECONDS)
    if left <= 0:
        return False
    poller = select.poll()
    for link in links:
        poller.register(link, link.events)
    return bool(poller.poll(math.ceil(left * 1e3)))


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's memory as bytes, so that every dtype travels."""
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    if flat.requires_grad:
        flat = flat.detach()
    if flat.dtype not in _NUMPYS:
        if flat.numel() == 1:
            # Contiguous with any stride, but bytes are asked for by one of 1.
            flat = flat.as_strided((1,), (1,))
        flat = flat.view(torch.uint8)
    return flat.numpy().view(np.uint8)


_transports: weakref.WeakSet[LinkTransport] = weakref.WeakSet()


def _forsake_all() -> None:
    for transport in list(_transports):
        transport.forsake()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forsake_all)
