"""Starting a bucket's reduction, and what is in flight until its result is in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, cast_dtype
from adasum.observer import Observer
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, FusedBuffer, Group, Reducer, Request, Sum, Work


class Reduction(Protocol):
    """A started reduction of one bucket."""

    def wait(self) -> None:
        """Block until the result is where it belongs; raise what went wrong."""
        ...

    def notify_observer(self) -> None:
        """Show the result to the observer; called in one order on all ranks."""
        ...

    def discard(self) -> None:
        """Block until nothing uses the bucket's memory, and leave the parameters as they are."""
        ...


class ReductionList:
    """The reductions of one bucket that is reduced in several parts."""

    def __init__(self, parts: Sequence[Reduction]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Wait for every part."""
        for part in self._parts:
            part.wait()

    def notify_observer(self) -> None:
        """Show every part's result."""
        for part in self._parts:
            part.notify_observer()

    def discard(self) -> None:
        """Discard every part."""
        for part in self._parts:
            part.discard()


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
    _requests: WeakKeyDictionary[FusedBuffer, Request] = field(default_factory=WeakKeyDictionary)

    def check(self) -> None:
        """Raise ValueError naming `algorithm` unless it can carry `op` on these ranks."""
        try:
            self.group.check_algorithm(self.algorithm or "auto", self.op)
        except ValueError as error:
            raise ValueError(f"algorithm={self.algorithm!r}: {error}") from None

    def reduce_async(
        self, names: Sequence[str], tensors: Sequence[Tensor] | FusedBuffer, bucket: str
    ) -> BufferReduction | DenseReduction:
        """Start reducing a bucket's tensors in place, all in one group.

        Args:
            names: Of the tensors, for the observer.
            tensors: Those that are not contiguous are sent as copies. A buffer is reduced by a
                request that is made the first time and started at every call.
            bucket: The bucket's name.
        """
        if not isinstance(tensors, FusedBuffer):
            return DenseReduction(self, names, tensors, bucket)
        dtype = cast_dtype(self.compression, tensors.buffer.dtype)
        if dtype is None and self.compression is not Compression.none:
            return DenseReduction(self, names, tensors.tensors, bucket)
        return BufferReduction(self, names, tensors, dtype, bucket)

    def cast_buffer(self, fused: FusedBuffer, dtype: torch.dtype) -> FusedBuffer:
        """Return the buffer of `dtype` that `fused` is cast into, the same at every call."""
        if fused not in self._cast_buffers:
            self._cast_buffers[fused] = FusedBuffer([each.to(dtype) for each in fused.tensors])
        return self._cast_buffers[fused]

    def request(self, fused: FusedBuffer, bucket: str) -> Request:
        """Return the request that reduces a buffer, the same at every call.

        Not negotiated with the other ranks, which may have joined, or see the buffer for the first
        time.
        """
        if fused not in self._requests:
            self._requests[fused] = self.group.grouped_all_reduce_init(
                fused.tensors,
                self.op,
                algorithm=self.algorithm,
                name=bucket,
                prescale=self.prescale,
                postscale=self.postscale,
                negotiate=False,
            )
        return self._requests[fused]

    def forget(self, fused: FusedBuffer) -> None:
        """Drop a buffer's request, whose state is unknown after an error."""
        self._requests.pop(fused, None)

    def reduce_sparse_async(self, name: str, parameter: Tensor, bucket: str) -> SparseReduction:
        """Start reducing a sparse gradient, which `wait` replaces; it is sent uncompressed.

        Raises:
            NotImplementedError: `op` is Adasum.
        """
        return SparseReduction(self, name, parameter, bucket)


class _Observed:
    """Shows a reduction's tensors to the observer, if there is one, before and after."""

    def __init__(
        self, observer: Observer | None, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> None:
        self._observer = observer
        self._tensors = tensors
        self._token = observer.before_reduction(names, tensors) if observer else None

    def notify_observer(self) -> None:
        """Show the result to the observer, if there is one."""
        if self._observer:
            self._observer.after_reduction(self._token, self._tensors)


class BufferReduction(_Observed):
    """A started reduction of a bucket's buffer, which holds the result after `wait`."""

    def __init__(
        self,
        reducer: BucketReducer,
        names: Sequence[str],
        fused: FusedBuffer,
        dtype: torch.dtype | None,
        bucket: str,
    ) -> None:
        super().__init__(reducer.observer, names, fused.tensors)
        self._reducer = reducer
        self._fused = fused
        self._sent = fused if dtype is None else reducer.cast_buffer(fused, dtype)
        if self._sent is not fused:
            torch._foreach_copy_(self._sent.tensors, fused.tensors)
        self._request = reducer.request(self._sent, bucket)
        self._request.start()

    def wait(self) -> None:
        """Block until the result is in the buffer; raise what went wrong."""
        try:
            self._request.wait()
        except BaseException:
            self._reducer.forget(self._sent)
            raise
        if self._sent is not self._fused:
            torch._foreach_copy_(self._fused.tensors, self._sent.tensors)

    discard = wait


class DenseReduction(_Observed):
    """A started reduction of dense tensors, which hold the result after `wait`."""

    def __init__(
        self, reducer: BucketReducer, names: Sequence[str], tensors: Sequence[Tensor], bucket: str
    ) -> None:
        super().__init__(reducer.observer, names, [tensor.detach() for tensor in tensors])
        self._compression = reducer.compression
        self._sent: list[tuple[Tensor, Any]] = []
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
