"""Where gradients and differences lie: in buffers that travel as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels
from collectives.fused_buffer import FusedBuffer

__all__ = ["DeltaBuffers", "GradientBuffers", "travels"]

_Kind = tuple[str, torch.dtype, torch.device]


def travels(tensor: Tensor) -> bool:
    """Whether tensors of this kind can lie in a buffer."""
    return tensor.dtype in kernels.DTYPES and tensor.device.type in ("cpu", "cuda")


class GradientBuffers:
    """Gradients as views of their bucket's buffer, from the first step on."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[list[Tensor], FusedBuffer]] = {}

    def place(self, label: str, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What to send for these parameters: their gradients, moved into the buffer where needed.

        Each parameter's `grad` is a view of the buffer afterwards; one without a gradient gets
        zeros. Gradients that backward wrote into the buffer are not copied.
        """
        members, fused = self._buckets.get(label, ([], None))
        if fused is None or not _same(members, parameters):
            fused = FusedBuffer(parameters)
            self._leave(parameters)
            self._buckets[label] = list(parameters), fused
        here: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, view in zip(parameters, fused.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride():
                continue
            else:
                here.append(view)
                gradients.append(gradient.detach())
            parameter.grad = view
        if here:
            torch._foreach_copy_(here, gradients)
        return fused.tensors

    def _leave(self, parameters: Sequence[Tensor]) -> None:
        """Gives up the buffers that hold one of these: a gradient has one place."""
        moved = {id(parameter) for parameter in parameters}
        self._buckets = {
            label: (members, fused)
            for label, (members, fused) in self._buckets.items()
            if moved.isdisjoint(map(id, members))
        }

    def clear(self) -> None:
        """Zero gradients, in the buffers, for the parameters that have a place in one."""
        for parameters, fused in self._buckets.values():
            fused.buffer.zero_()
            for parameter, view in zip(parameters, fused.views, strict=True):
                if parameter.requires_grad:
                    parameter.grad = view


class DeltaBuffers:
    """Memory for the differences of as many buckets as are under way at once, used in turns.

    slots: how many; None for one a bucket. A slot is filled again only when the bucket before the
    last `slots - 1` has arrived.
    """

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._turn = 0
        self._memory: dict[_Kind, Tensor] = {}
        self._buffers: dict[tuple[str, _Kind], tuple[list[Tensor], FusedBuffer]] = {}

    def restart(self) -> None:
        """A new step begins, nothing is under way: buckets get the slots that they had before."""
        self._turn = 0

    def of(self, label: str, parameters: Sequence[Tensor]) -> tuple[FusedBuffer, FusedBuffer]:
        """(for the values before the step, for the difference), each with views like parameters.

        What the first holds is lost with the next call.
        """
        slot = label if self._slots is None else str(self._turn % self._slots)
        self._turn += 1
        before, delta = (self._in(each, label, parameters) for each in ("before", slot))
        delta.clear_padding()
        return before, delta

    def _in(self, slot: str, label: str, parameters: Sequence[Tensor]) -> FusedBuffer:
        kind = slot, parameters[0].dtype, parameters[0].device
        members, buffer = self._buffers.get((label, kind), ([], None))
        if buffer is None or not _same(members, parameters):
            # Evenly strided elements are 1-D without a copy, and not contiguous.
            flat = [p.detach().reshape(-1).contiguous() for p in parameters]
            numel = kernels.layout_of(flat).numel
            memory = self._memory.get(kind)
            if memory is None or memory.numel() < numel:
                memory = torch.empty(numel, dtype=kind[1], device=kind[2])
                self._memory[kind] = memory
                # Who lies in the smaller memory moves, so that it is given back.
                for key in [key for key in self._buffers if key[1] == kind]:
                    del self._buffers[key]
            buffer = FusedBuffer(parameters, memory)
            self._buffers[label, kind] = list(parameters), buffer
        return buffer


def _same(members: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(members) == len(others) and all(a is b for a, b in zip(members, others, strict=True))
