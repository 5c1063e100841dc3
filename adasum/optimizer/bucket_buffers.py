"""Buffers in which a bucket's gradients or differences lie side by side, to be reduced in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

import kernels
from collectives import FusedBuffer
from collectives.fused_buffer import memory_of

_Kind: TypeAlias = tuple[str, torch.dtype, torch.device]


def fits_in_buffer(tensor: Tensor) -> bool:
    """Return whether tensors of this dtype and device can lie in a buffer."""
    return tensor.dtype in kernels.DTYPES and tensor.device.type in ("cpu", "cuda")


class GradientBuffers:
    """One buffer a bucket, of which its gradients are views from the first step on."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[list[Tensor], FusedBuffer]] = {}

    def place(self, name: str, parameters: Sequence[Tensor]) -> FusedBuffer:
        """Move a bucket's gradients into its buffer, where they are not there yet.

        Afterwards each parameter's `grad` is a view of the buffer; one that had no gradient has
        zeros. What backward accumulated in the buffer is not copied.

        Args:
            name: The bucket's name.
            parameters: Its parameters; with others than at the last call it gets a new buffer.
        """
        members, fused = self._buckets.get(name, ([], None))
        if fused is None or not _same(members, parameters):
            fused = FusedBuffer(parameters, _memory_of_gradients(parameters))
            # A gradient lies in one buffer: those that hold one of these are dropped.
            moved = {id(parameter) for parameter in parameters}
            self._buckets = {
                other: bucket
                for other, bucket in self._buckets.items()
                if moved.isdisjoint(map(id, bucket[0]))
            }
            self._buckets[name] = list(parameters), fused
        targets: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, view in zip(parameters, fused.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride():
                continue
            else:
                targets.append(view)
                gradients.append(gradient.detach())
            parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, gradients)
        return fused

    def zero(self) -> None:
        """Zero the buffers, and make them the gradients of their trainable parameters."""
        for parameters, fused in self._buckets.values():
            fused.buffer.zero_()
            for parameter, view in zip(parameters, fused.views, strict=True):
                if parameter.requires_grad:
                    parameter.grad = view


def _memory_of_gradients(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the memory in which all gradients lie already as a buffer would hold them, or None."""
    gradients = [parameter.grad for parameter in parameters]
    found = [
        gradient.detach()
        for gradient, parameter in zip(gradients, parameters, strict=True)
        if gradient is not None and gradient.stride() == parameter.stride()
    ]
    if len(found) < len(gradients) or not all(gradient.is_contiguous() for gradient in found):
        return None
    return memory_of(found, kernels.layout_of(found))


class DeltaBuffers:
    """Buffers for the differences of the buckets in flight, used in turn.

    Args:
        slots: How many buckets may be in flight at once; None for a slot for every bucket. A
            bucket's slot is used again `slots` buckets later, which must not start before it is
            done.
    """

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._turn = 0
        self._memory: dict[_Kind, Tensor] = {}
        self._buffers: dict[_Kind, dict[str, tuple[list[Tensor], FusedBuffer]]] = {}

    def restart(self) -> None:
        """Begin a new step with nothing in flight: buckets get the same slots as in the last."""
        self._turn = 0

    def of(self, name: str, parameters: Sequence[Tensor]) -> tuple[FusedBuffer, FusedBuffer]:
        """Return a bucket's two buffers, each with views like its parameters.

        Returns:
            One for the values before the step, whose content the next call overwrites, and one for
            the differences.
        """
        slot = name if self._slots is None else str(self._turn % self._slots)
        self._turn += 1
        before, delta = (self._in(each, name, parameters) for each in ("before", slot))
        delta.clear_padding()
        return before, delta

    def _in(self, slot: str, name: str, parameters: Sequence[Tensor]) -> FusedBuffer:
        kind = slot, parameters[0].dtype, parameters[0].device
        buffers = self._buffers.setdefault(kind, {})
        members, buffer = buffers.get(name, ([], None))
        if buffer is None or not _same(members, parameters):
            # Evenly strided elements become 1-D without a copy, and are not contiguous then.
            flat = [p.detach().reshape(-1).contiguous() for p in parameters]
            numel = kernels.layout_of(flat).numel
            memory = self._memory.get(kind)
            if memory is None or memory.numel() < numel:
                memory = torch.empty(numel, dtype=kind[1], device=kind[2])
                self._memory[kind] = memory
                # Buckets in the smaller memory move, so that it is freed.
                buffers.clear()
            buffer = FusedBuffer(parameters, memory)
            buffers[name] = list(parameters), buffer
        return buffer


def _same(members: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return list(map(id, members)) == list(map(id, others))
