"""Messages between ranks of one host through shared memory. CPU tensors only.

`rendezvous` finds the ranks and opens the links, `channel` is one link; `hybrid` adds a way to the
ranks of other hosts.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from ..errors import CollectiveTimeoutError, TransportError
from .base import Message
from .channel import Bytes, Link, PeerGone

# Looks at the sockets before sleeping, some 20 us in all: a partner that works in step answers
# within that, and its answer then costs neither side a wake-up.
_LOOKS = 10


class ShmTransport:
    """Point-to-point messages over `links`, by peer.

    After a failed exchange it cannot be used, and the peers are told the cause, so that they fail
    with it at once instead of waiting. In a forked child it cannot be used; the parent's is not
    touched by that.
    """

    def __init__(self, rank: int, size: int, links: Mapping[int, Link]) -> None:
        self.rank = rank
        self.size = size
        self.peers = frozenset(links)
        self._links = dict(links)
        self._unusable = ""
        # With more ranks than cores a rank that looks again keeps its partner from working.
        self._looks = _LOOKS if len(links) < _cores() else 0
        _transports.add(self)

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"tensor is on {device}; shared memory carries cpu, move it there")

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], step: str, timeout: float
    ) -> None:
        if self._unusable:
            raise TransportError(f"shared memory cannot be used in {step}: {self._unusable}")
        deadline = time.monotonic() + timeout
        active: dict[int, Link] = {}
        try:
            for peer, tensor in sends:
                if tensor.numel():
                    active[peer] = link = self._link(peer, step)
                    link.send(_bytes(tensor))
            for peer, tensor in recvs:
                if tensor.numel():
                    active[peer] = link = self._link(peer, step)
                    link.receive(_bytes(tensor))
            self._run(list(active.values()), step, deadline, timeout)
        except PeerGone as gone:
            self.abandon(str(gone))
            raise CollectiveTimeoutError(
                f"rank {self.rank} got no answer from rank {gone.peer} in {step}: {gone}"
            ) from None
        except BaseException as error:
            self.abandon(str(error) or type(error).__name__)
            raise

    def _link(self, peer: int, step: str) -> Link:
        if peer not in self._links:
            raise TransportError(
                f"rank {self.rank} shares no memory with rank {peer}, needed in {step}"
            )
        return self._links[peer]

    def _run(self, links: list[Link], step: str, deadline: float, timeout: float) -> None:
        """Advance the links until none is busy."""
        looks = self._looks
        while links:
            moved = False
            for link in links:
                moved = link.advance() or moved
            links = [link for link in links if link.busy]
            if moved or not links:
                looks = self._looks
            elif looks:
                looks -= 1
            elif not _wait(links, deadline):
                late = ", ".join(f"rank {link.peer}" for link in links)
                raise CollectiveTimeoutError(
                    f"rank {self.rank} got no answer from {late} in {step} within {timeout:.3g} s"
                )

    def split(self, ranks: Sequence[int], timeout: float) -> NoReturn:
        raise TransportError("shared memory alone cannot be split: HybridTransport finds new links")

    def abandon(self, reason: str) -> None:
        """Close every link and tell the peers why; what is under way here is lost."""
        self._unusable = self._unusable or reason
        for link in self._links.values():
            link.close(reason)

    def close(self) -> None:
        """Close every link. What was sent before still arrives."""
        self._unusable = self._unusable or f"rank {self.rank} has closed it"
        for link in self._links.values():
            link.close()

    def forsake(self) -> None:
        """In a forked child: let go of the parent's sockets, which would outlive the parent."""
        self._unusable = "this process was forked from a rank; only the rank itself can use it"
        for link in self._links.values():
            link.close()


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _wait(links: Sequence[Link], deadline: float) -> bool:
    """Sleep until a link can go on; False when none could before the deadline."""
    poller = select.poll()
    for link in links:
        poller.register(link, link.events)
    left = deadline - time.monotonic()
    return left > 0 and bool(poller.poll(math.ceil(left * 1e3)))


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's memory as bytes, so that every dtype travels."""
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return flat.detach().view(torch.uint8).numpy()


_transports: weakref.WeakSet[ShmTransport] = weakref.WeakSet()


def _forsake_all() -> None:
    for transport in list(_transports):
        transport.forsake()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forsake_all)
