"""Starting a bucket's reduction, and what is in flight until its result is in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, cast_dtype
from adasum.observer import Observer
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, Group, Reducer, Sum, Work, buffer_of, parse_all_reduce_spec
from collectives.execution.phases import phases_of
from collectives.fused_buffer import FusedBuffer

__all__ = ["BucketReducer", "DenseReduction", "SparseReduction"]


@dataclass
class BucketReducer:
    """Reduces an optimizer's buckets: what all its reductions have in common.

    Attributes:
        group: The ranks.
        op: Sum, Average or Adasum.
        compression: Casts what is sent.
        algorithm: As `collectives` takes it; None is "auto".
        prescale: Multiplies what is sent.
        postscale: Multiplies the result.
        observer: Sees every reduction.
    """

    group: Group
    op: Reducer
    compression: type[Compressor] = Compression.none
    algorithm: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    observer: Observer | None = None
    _cast_buffers: WeakKeyDictionary[FusedBuffer, FusedBuffer] = field(
        default_factory=WeakKeyDictionary
    )

    def check(self) -> None:
        """Raise ValueError naming `algorithm` unless it can carry `op` on these ranks."""
        try:
            for part in parse_all_reduce_spec(self.algorithm or "auto"):
                if part.outer != "auto":
                    phases_of(part, self.op, self.group.topology)
        except ValueError as error:
            raise ValueError(f"algorithm={self.algorithm!r}: {error}") from None

    def cast_buffer(self, tensors: Sequence[Tensor]) -> FusedBuffer | None:
        """Return the buffer to cast the tensors into, the same at every call.

        None where the compression does more than cast, or the tensors do not lie in one buffer.
        """
        fused = buffer_of(tensors)
        if fused is None:
            return None
        dtype = cast_dtype(self.compression, tensors[0].dtype)
        if dtype is None:
            return None
        if fused not in self._cast_buffers:
            self._cast_buffers[fused] = FusedBuffer([each.to(dtype) for each in tensors])
        return self._cast_buffers[fused]

    def reduce_async(
        self, names: Sequence[str], tensors: Sequence[Tensor], bucket: str
    ) -> DenseReduction:
        """Start reducing a bucket's tensors in place, all in one group.

        Tensors that are not contiguous are sent as copies.
        """
        return DenseReduction(self, names, tensors, bucket)

    def reduce_sparse_async(self, name: str, parameter: Tensor, bucket: str) -> SparseReduction:
        """Start reducing a sparse gradient, which `wait` replaces; it is sent uncompressed.

        Raises:
            NotImplementedError: `op` is Adasum.
        """
        return SparseReduction(self, name, parameter, bucket)


class DenseReduction:
    """A started reduction of dense tensors, which hold the result after `wait`."""

    def __init__(
        self, reducer: BucketReducer, names: Sequence[str], tensors: Sequence[Tensor], bucket: str
    ) -> None:
        self._compression = reducer.compression
        self._tensors = [tensor.detach() for tensor in tensors]
        self._observer = reducer.observer
        self._token = (
            self._observer.before_reduction(names, self._tensors) if self._observer else None
        )
        self._sent: list[tuple[Tensor, Any]] = []
        cast_buffer = reducer.cast_buffer(self._tensors)
        if cast_buffer is not None:
            torch._foreach_copy_(cast_buffer.tensors, self._tensors)
            self._sent = [(cast, None) for cast in cast_buffer.tensors]
        else:
            for tensor in self._tensors:
                compressed, context = reducer.compression.compress(tensor)
                self._sent.append((compressed.contiguous(), context))
        self._work: Work | Any = reducer.group.grouped_all_reduce(
            [sent for sent, _ in self._sent],
            reducer.op,
            algorithm=reducer.algorithm,
            name=bucket,
            prescale=reducer.prescale,
            postscale=reducer.postscale,
            async_op=True,
        )

    def wait(self) -> None:
        """Block until the result is in the tensors; raise what went wrong."""
        self._work.wait()
        for tensor, (sent, context) in zip(self._tensors, self._sent, strict=True):
            if sent is not tensor:
                tensor.copy_(self._compression.decompress(sent, context))

    def notify_observer(self) -> None:
        """Show the result to the observer, if there is one."""
        if self._observer:
            self._observer.after_reduction(self._token, self._tensors)

    discard = wait


class SparseReduction:
    """A started reduction of a sparse gradient, which `wait` replaces by the result."""

    def __init__(self, reducer: BucketReducer, name: str, parameter: Tensor, bucket: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if reducer.op not in (Sum, Average):
            raise NotImplementedError(
                f"the gradient of {name} is sparse, of which {reducer.op} is not defined: pass "
                "sparse_as_dense=True, or method='delta'"
            )
        self._parameter = parameter
        self._postscale = reducer.postscale
        if reducer.prescale != 1.0:
            gradient = gradient * reducer.prescale
        self._handle = sparse_all_reduce_async(
            reducer.group, gradient, reducer.op, f"{bucket}: {name}"
        )

    def wait(self) -> None:
        """Block until the result is there; raise what went wrong."""
        result = self._handle.wait()
        self._parameter.grad = result * self._postscale if self._postscale != 1.0 else result

    def notify_observer(self) -> None:
        """Do nothing: sparse gradients are not observed."""

    discard = wait
