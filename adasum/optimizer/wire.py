"""How gradients and differences travel: the group, the operation, scales and compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adasum.compression import LONG, Compression, Compressor
from adasum.sparse import sparse_all_reduce_async
from adasum.watch import Watcher
from collectives import Average, Group, Reducer, Sum, Work, parse_all_reduce_spec
from collectives.execution.phases import phases_of
from collectives.fused_buffer import FusedBuffer, buffer_of

__all__ = ["InFlight", "SparseInFlight", "Wire"]


@dataclass
class Wire:
    """What one optimizer's reductions have in common.

    algorithm: as `collectives` takes it; None is "auto". watch: sees every reduction.
    """

    group: Group
    op: Reducer
    compression: type[Compressor] = Compression.none
    algorithm: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    watch: Watcher | None = None
    _shorter: WeakKeyDictionary[FusedBuffer, FusedBuffer] = field(default_factory=WeakKeyDictionary)

    def check(self) -> None:
        """ValueError naming `algorithm` unless it can carry `op` on these ranks."""
        try:
            for part in parse_all_reduce_spec(self.algorithm or "auto"):
                if part.outer != "auto":
                    phases_of(part, self.op, self.group.topology)
        except ValueError as error:
            raise ValueError(f"algorithm={self.algorithm!r}: {error}") from None

    def shorter(self, tensors: Sequence[Tensor]) -> FusedBuffer | None:
        """A buffer to cast them into, the same at every call; None unless that is all there is to
        the compression and they lie in a buffer themselves."""
        dtype = getattr(self.compression, "wire", None)
        fused = buffer_of(tensors)
        if fused is None or dtype is None or tensors[0].dtype not in LONG:
            return None
        if fused not in self._shorter:
            self._shorter[fused] = FusedBuffer([each.to(dtype) for each in tensors])
        return self._shorter[fused]

    def reduce_async(self, names: Sequence[str], tensors: Sequence[Tensor], label: str) -> InFlight:
        """Starts reducing the tensors in place, all in one group; strided ones travel as copies."""
        return InFlight(self, names, tensors, label)

    def reduce_sparse_async(self, name: str, parameter: Tensor, label: str) -> SparseInFlight:
        """Starts reducing a sparse gradient, which `wait` replaces by the answer.

        NotImplementedError naming the parameter for Adasum. Values travel uncompressed.
        """
        return SparseInFlight(self, name, parameter, label)


class InFlight:
    """A reduction under way; the tensors hold the answer after `wait`."""

    def __init__(
        self, wire: Wire, names: Sequence[str], tensors: Sequence[Tensor], label: str
    ) -> None:
        self._compression = wire.compression
        self._tensors = [tensor.detach() for tensor in tensors]
        self._watch = wire.watch
        self._token = self._watch.sent(names, self._tensors) if self._watch else None
        self._sent: list[tuple[Tensor, Any]] = []
        short_buffer = wire.shorter(self._tensors)
        if short_buffer is not None:
            torch._foreach_copy_(short_buffer.tensors, self._tensors)
            self._sent = [(short, None) for short in short_buffer.tensors]
        else:
            for tensor in self._tensors:
                short, ctx = wire.compression.compress(tensor)
                self._sent.append((short.contiguous(), ctx))
        self._work: Work | Any = wire.group.grouped_all_reduce(
            [short for short, _ in self._sent],
            wire.op,
            algorithm=wire.algorithm,
            name=label,
            prescale=wire.prescale,
            postscale=wire.postscale,
            async_op=True,
        )

    def wait(self) -> None:
        """Blocks until the answer is in the tensors; raises what went wrong on the way."""
        self._work.wait()
        for tensor, (short, ctx) in zip(self._tensors, self._sent, strict=True):
            if short is not tensor:
                tensor.copy_(self._compression.decompress(short, ctx))

    def report(self) -> None:
        """Shows the answer to the watcher, if there is one."""
        if self._watch:
            self._watch.reduced(self._token, self._tensors)


class SparseInFlight:
    """A sparse gradient under way; the parameter's `grad` is the answer after `wait`."""

    def __init__(self, wire: Wire, name: str, parameter: Tensor, label: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if wire.op not in (Sum, Average):
            raise NotImplementedError(
                f"the gradient of {name} is sparse, of which {wire.op} is not defined: pass "
                "sparse_as_dense=True, or method='delta'"
            )
        self._parameter = parameter
        self._postscale = wire.postscale
        if wire.prescale != 1.0:
            gradient = gradient * wire.prescale
        self._handle = sparse_all_reduce_async(wire.group, gradient, wire.op, f"{label}: {name}")

    def wait(self) -> None:
        """Blocks until the answer is there; raises what went wrong on the way."""
        answer = self._handle.wait()
        self._parameter.grad = answer * self._postscale if self._postscale != 1.0 else answer

    def report(self) -> None:
        """Nobody watches sparse gradients."""
