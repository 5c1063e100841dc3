"""What the steps of a call have in common: their transport, labels, timeout and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collectives.inference_mode import inference_mode
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport


class Workspace:
    """Reusable memory for what is received but not yet reduced.

    On the CPU it is one block, whose pages are mapped once. On CUDA torch's allocator does as much,
    for each stream, and for each graph that is captured.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return `numel` uninitialised elements of `like`'s dtype, valid until the next take."""
        if not like.is_cpu:
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        nbytes = numel * like.element_size()
        # Nobody may write outside inference mode to a tensor made inside it.
        with inference_mode(False):
            if self._block.numel() < nbytes:
                self._block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return self._block[:nbytes].view(like.dtype)


@dataclass(frozen=True)
class CallContext:
    """What all steps of a call have in common; without a topology all ranks are on one node."""

    transport: Transport
    label: str
    timeout: float
    workspace: Workspace
    topology: Topology | None = None

    def is_near(self, peer: int) -> bool:
        """Return whether `peer` is on this rank's node."""
        nodes = self.topology
        return nodes is None or nodes.node_of(peer) == nodes.node_of(self.transport.rank)
