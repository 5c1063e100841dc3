"""What the steps of a call have in common: their transport, labels, timeout and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collectives.cost import ASSUMED, LinkRates, Rate
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
    """What all steps of a call have in common.

    Attributes:
        transport: Between the ranks.
        label: What an error calls the call.
        timeout: Seconds for each step.
        workspace: Memory for what is received.
        rates: What messages between GPUs cost, the same on all ranks; assumed where nobody says.
        topology: The nodes; one of all ranks for None.
    """

    transport: Transport
    label: str
    timeout: float
    workspace: Workspace
    rates: LinkRates | None = ASSUMED
    topology: Topology | None = None

    def link(self, peer: int, *, one_tree: bool) -> tuple[Rate, float]:
        """Return what a message between GPUs, to or from `peer`, costs; and the host, in seconds.

        one_tree: for an operator whose bits depend on how messages are cut. Rates may have been
            measured, and the bits of another run must be the same.
        """
        rates = self.rates if self.rates is not None and not one_tree else ASSUMED
        nodes = self.topology
        near = nodes is None or nodes.node_of(peer) == nodes.node_of(self.transport.rank)
        return rates.intra if near else rates.inter, rates.host
