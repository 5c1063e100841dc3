"""Buffers in which a bucket's differences lie side by side, to be reduced in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

import kernels
from adasum.modes import outside_modes
from adasum.optimizer.buckets.kinds import Kind, buffer_for, kind_of
from adasum.real_pairs import as_reals
from collectives import FusedBuffer

_Place: TypeAlias = tuple[str, torch.dtype, torch.device]


class DeltaBuffers:
    """Buffers for the differences of the buckets in flight, used in turn.

    A bucket's slot is used again `slots` buckets later, which must not start before it is done; for
    None every bucket has a slot of its own.
    """

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._turn = 0
        self._memory: dict[_Place, Tensor] = {}
        self._buffers: dict[_Place, dict[str, tuple[list[Kind], FusedBuffer]]] = {}

    def restart(self) -> None:
        """Begin a new step with nothing in flight: buckets get the same slots as in the last."""
        self._turn = 0

    @outside_modes()
    def of(self, name: str, parameters: Sequence[Tensor]) -> tuple[FusedBuffer, FusedBuffer]:
        """Return a bucket's two buffers, with views like its parameters, of one dtype and device.

        One is for the values before the step, whose content the next call overwrites, and one for
        the differences. Views of complex parameters are pairs of real numbers.
        """
        slot = name if self._slots is None else str(self._turn % self._slots)
        self._turn += 1
        return self._in("before", name, parameters), self._in(slot, name, parameters)

    def _in(self, slot: str, name: str, parameters: Sequence[Tensor]) -> FusedBuffer:
        kinds = list(map(kind_of, parameters))
        place = slot, kinds[0].dtype, kinds[0].device
        buffers = self._buffers.setdefault(place, {})
        made_for, buffer = buffers.get(name, (None, None))
        if buffer is None or made_for != kinds:
            # reshape gives a view of evenly strided elements, which is not contiguous.
            flat = [as_reals(p.detach()).reshape(-1).contiguous() for p in parameters]
            numel = kernels.layout_of(flat).numel
            memory = self._memory.get(place)
            if memory is None or memory.numel() < numel:
                memory = torch.empty(numel, dtype=flat[0].dtype, device=kinds[0].device)
                self._memory[place] = memory
                # Buckets in the smaller memory move, so that it is freed.
                buffers.clear()
            buffer = buffer_for(parameters, kinds, memory)
            buffers[name] = kinds, buffer
        return buffer

    def clear(self) -> None:
        """Let go of all buffers; nothing may be in flight."""
        self._memory.clear()
        self._buffers.clear()
