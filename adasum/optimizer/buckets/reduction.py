"""Starting a bucket's reduction, and what is in flight until its result is in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, cast_dtype
from adasum.modes import outside_modes
from adasum.observer import Observer
from adasum.real_pairs import as_reals
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, FusedBuffer, Group, Reducer, Request, Sum

Owners: TypeAlias = Sequence[int] | None
_WaitAndInstall: TypeAlias = tuple[Callable[[], Any], Callable[[Any], None]]


@dataclass
class Reduction:
    """A started reduction of a bucket, or of a part of one.

    Attributes:
        wait_for_result: Blocks until the reduction is done, so that nothing uses the memory that
            was sent; returns its result, or raises what went wrong.
        install: Puts that result where it belongs.
        notify_observer: Shows the result to the observer; called in one order on all ranks.
    """

    wait_for_result: Callable[[], Any]
    install: Callable[[Any], None]
    notify_observer: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Block until the result is where it belongs; raise what went wrong."""
        self.install(self.wait_for_result())


@dataclass
class BucketReducer:
    """Reduces an optimizer's buckets: what all its reductions have in common.

    Attributes:
        group: The ranks.
        op: Sum, Average, Adasum or a user's.
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
    _requests: WeakKeyDictionary[FusedBuffer, tuple[Owners, Request]] = field(
        default_factory=WeakKeyDictionary
    )

    @outside_modes
    def reduce_async(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor] | FusedBuffer,
        bucket: str,
        owners: Owners = None,
    ) -> Reduction:
        """Start reducing a bucket's tensors in place, all in one group.

        Args:
            names: Of the tensors, for the observer.
            tensors: Those that are not contiguous are sent as copies. A buffer is reduced by a
                request that is made the first time and started at every call.
            bucket: The bucket's name.
            owners: The ranks that get the tensors' results, one for each; all ranks unless given.
        """
        fused: FusedBuffer | None = None
        if isinstance(tensors, FusedBuffer):
            fused, targets = tensors, tensors.tensors
        else:
            targets = [as_reals(each.detach()) for each in tensors]
        observer = self.observer
        token = observer.before_reduction(names, targets) if observer else None

        def notify_observer() -> None:
            if observer:
                observer.after_reduction(token, targets)

        dtype = cast_dtype(self.compression, targets[0].dtype)
        options = self._scaled(bucket) if owners is not None else self._options(bucket, names)
        if fused is not None and (dtype is not None or self.compression is Compression.none):
            started = self._start_buffer(fused, dtype, options, owners)
        else:
            started = self._start_tensors(targets, options, owners)
        return Reduction(*started, notify_observer)

    def _start_buffer(
        self,
        fused: FusedBuffer,
        dtype: torch.dtype | None,
        options: dict[str, Any],
        owners: Owners,
    ) -> _WaitAndInstall:
        """Start the buffer's request; unless `dtype` is None, that of its copy cast to `dtype`.

        The request, and the buffer of the copy, are kept as long as the buffer.
        """
        sent = fused
        if dtype is not None:
            if fused not in self._cast_buffers:
                self._cast_buffers[fused] = FusedBuffer([each.to(dtype) for each in fused.tensors])
            sent = self._cast_buffers[fused]
            torch._foreach_copy_(sent.tensors, fused.tensors)
        kept, request = self._requests.get(sent, (owners, None))
        if request is None or kept != owners:
            # Not negotiated with the other ranks, which may have joined, or see the buffer for the
            # first time.
            if owners is None:
                request = self.group.grouped_all_reduce_init(
                    sent.tensors, self.op, negotiate=False, **options
                )
            else:
                request = self.group.reduce_to_owners_init(
                    sent.tensors, self.op, owners=owners, negotiate=False, **options
                )
            self._requests[sent] = owners, request
        request.start()

        def wait() -> None:
            try:
                request.wait()
            except BaseException:
                # Its state is unknown after an error.
                self._requests.pop(sent, None)
                raise

        def install(_: Any) -> None:
            if sent is not fused:
                torch._foreach_copy_(fused.tensors, sent.tensors)

        return wait, install

    def _start_tensors(
        self, tensors: Sequence[Tensor], options: dict[str, Any], owners: Owners
    ) -> _WaitAndInstall:
        """Start reducing the tensors, each compressed by itself."""
        compressed = [self.compression.compress(tensor) for tensor in tensors]
        sent = [each.contiguous() for each, _ in compressed]
        work: Any
        if owners is None:
            work = self.group.grouped_all_reduce(sent, self.op, async_op=True, **options)
        else:
            work = self.group.reduce_to_owners(
                sent, self.op, owners=owners, async_op=True, **options
            )

        def install(_: Any) -> None:
            for tensor, result, (_, context) in zip(tensors, sent, compressed, strict=True):
                if result is not tensor:
                    tensor.copy_(self.compression.decompress(result, context))

        return work.wait, install

    def _options(self, bucket: str, names: Sequence[str]) -> dict[str, Any]:
        # A bucket is one buffer, whatever it holds.
        options = {"algorithm": self.algorithm, "packed": True, "names": names}
        return {**options, **self._scaled(bucket)}

    def _scaled(self, bucket: str) -> dict[str, Any]:
        return {"name": bucket, "prescale": self.prescale, "postscale": self.postscale}

    @outside_modes
    def reduce_sparse_async(self, name: str, parameter: Tensor, bucket: str) -> Reduction:
        """Start reducing a sparse gradient, which `wait` replaces; it is sent uncompressed.

        Raises:
            NotImplementedError: `op` is Adasum.
        """
        if self.op not in (Sum, Average):
            raise NotImplementedError(
                f"the gradient of {name} is sparse, of which {self.op} is not defined: pass "
                "sparse_as_dense=True, or method='delta'"
            )
        gradient = parameter.grad
        assert gradient is not None
        if self.prescale != 1.0:
            gradient = gradient * self.prescale
        handle = sparse_all_reduce_async(self.group, gradient, self.op, f"{bucket}: {name}")

        def install(result: Tensor) -> None:
            parameter.grad = result * self.postscale if self.postscale != 1.0 else result

        return Reduction(handle.wait, install)
