"""The ranks of a part while a transport is split: they exchange messages over the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.transport.base import Message, Messages, Transport


class Members(Transport):
    """A transport between some ranks of another one, renumbered, which uses that one's messages.

    To be used only inside a call that all of these ranks make on the whole: messages of other calls
    would mix with these. `ranks` has this one, and is in the new order.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole = whole
        self._ranks = tuple(ranks)
        self.rank = self._ranks.index(whole.rank)
        self.size = len(self._ranks)
        self.names = tuple(map(whole.name, self._ranks))

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError as the whole does."""
        self._whole.check_device(device)

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        """Exchange a step's messages: `Transport.exchange`."""
        self._whole.exchange(self._in_whole(sends), self._in_whole(recvs), step, timeout)

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        """Split the whole."""
        return self._whole.split([self._ranks[rank] for rank in ranks], timeout)

    def close(self) -> None:
        """Leave the whole as it is."""

    def _in_whole(self, messages: Messages) -> list[Message]:
        return [Message(self._ranks[peer], tensor) for peer, tensor in messages]
