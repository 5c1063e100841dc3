"""Starting a bucket's reduction, and what is in flight until its result is in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, cast_dtype
from adasum.modes import outside_modes
from adasum.observer import ObservedGram, Observer, observe
from adasum.reducer import gives_gram, observed_copy
from adasum.request_pool import RequestPool
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, FusedBuffer, Group, Reducer, Request, Sum
from collectives.trace import span

Owners: TypeAlias = Sequence[int] | None


@dataclass
class Reduction:
    """A started reduction of a bucket, or of a part of one.

    `wait_for_result` blocks until the reduction is done, so that nothing uses the memory that was
    sent, and returns its result, or raises what went wrong; `install` puts that result where it
    belongs; `notify_observer` shows it to the observer, in one order on all ranks.
    """

    wait_for_result: Callable[[], Any]
    install: Callable[[Any], None]
    notify_observer: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Block until the result is where it belongs; raise what went wrong."""
        self.install(self.wait_for_result())


class InFlight:
    """The reductions that were started and not waited for, oldest first."""

    def __init__(self) -> None:
        self._started: list[Reduction] = []
        self._done: list[Reduction] = []

    def __len__(self) -> int:
        return len(self._started)

    def add(self, reductions: Sequence[Reduction]) -> None:
        """Take note of reductions that were just started."""
        self._started += reductions

    def wait(self, below: int = 1) -> None:
        """Wait for the oldest until fewer than `below` are in flight.

        CollectiveError: the first that failed; nothing is in flight any more.
        """
        if len(self) < below:
            return
        with span(lambda: f"waiting for {len(self)} buckets"), self.none_after_an_error():
            while len(self) >= below:
                first = self._started.pop(0)
                first.wait()
                self._done.append(first)

    def notify_observers(self) -> None:
        """Show what was waited for; called at the same points on every rank.

        Not by `wait`: an observer may call collectives, and how many buckets backward starts and
        waits for may differ between the ranks.
        """
        while self._done:
            self._done.pop(0).notify_observer()

    def forget_done(self) -> None:
        """Begin a new step, whose observers see nothing of the last one."""
        self._done.clear()

    @contextmanager
    def none_after_an_error(self) -> Iterator[None]:
        """On an error wait for what is in flight, drop its results, and note its errors."""
        try:
            yield
        except BaseException as error:
            started, self._started = self._started, []
            for reduction in started:
                try:
                    reduction.wait_for_result()
                except Exception as other:  # noqa: BLE001 - a note of the first
                    if other is not error and hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"after it: {type(other).__name__}: {other}")
            raise


@dataclass
class BucketReducer:
    """Reduces an optimizer's buckets: what all its reductions have in common.

    `algorithm` is as `collectives` takes it; `prescale` multiplies what is sent, `postscale` the
    result.
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
    _requests: RequestPool = field(default_factory=RequestPool)

    def reduce_async(
        self, names: Sequence[str], fused: FusedBuffer, bucket: str, owners: Owners = None
    ) -> Reduction:
        """Start reducing a bucket's tensors in place, all in one group.

        The request of `fused`, and the memory of what is sent in another dtype, are kept as long as
        it is. `owners` are the ranks that get the tensors' results, one for each; all ranks unless
        given.
        """
        tensors = fused.tensors
        dtype = cast_dtype(self.compression, fused.buffer.dtype)
        if dtype is None and self.compression is not Compression.none:
            return self._reduce_compressed(names, tensors, bucket, owners)
        sent = fused if dtype is None else self._cast(fused, dtype)
        by_gram = self.observer is not None and self._gives_gram(sent.tensors)
        show = observe(self.observer, names, tensors, by_gram=by_gram)
        make = partial(self._request, sent.tensors, names, bucket, owners, observed=by_gram)
        started = self._requests.start(sent, (self.op, owners and tuple(owners), by_gram), make)
        found: list[ObservedGram | None] = []

        def install(gram: ObservedGram | None) -> None:
            found.append(gram)
            if sent is not fused:
                torch._foreach_copy_(tensors, sent.tensors)

        return Reduction(started.wait, install, lambda: show(found.pop()))

    def _gives_gram(self, sent: Sequence[Tensor]) -> bool:
        options: Any = {"packed": True, "algorithm": self.algorithm}
        return gives_gram(self.observer, self.op, self.group, sent, **options)

    def _cast(self, fused: FusedBuffer, dtype: torch.dtype) -> FusedBuffer:
        """Return a copy of the buffer in another dtype, in the same memory every time."""
        if fused not in self._cast_buffers:
            self._cast_buffers[fused] = FusedBuffer([each.to(dtype) for each in fused.tensors])
        sent = self._cast_buffers[fused]
        torch._foreach_copy_(sent.tensors, fused.tensors)
        return sent

    def _reduce_compressed(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        bucket: str,
        owners: Owners,
    ) -> Reduction:
        """Start reducing the tensors, each compressed by itself: what that gives is not known."""
        show = observe(self.observer, names, tensors, by_gram=False)
        compressed = [self.compression.compress(tensor) for tensor in tensors]
        sent = [each.contiguous() for each, _ in compressed]
        request = self._request(sent, names, bucket, owners)
        request.start()

        def install(_: Any) -> None:
            for tensor, result, (_, context) in zip(tensors, sent, compressed, strict=True):
                if result is not tensor:
                    tensor.copy_(self.compression.decompress(result, context))

        return Reduction(request.wait, install, lambda: show(None))

    def _request(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        bucket: str,
        owners: Owners,
        *,
        observed: bool = False,
    ) -> Request[Any]:
        # Not negotiated with the other ranks, which may have joined, or see the buffer for the
        # first time.
        options: Any = {"name": bucket, "prescale": self.prescale, "postscale": self.postscale}
        options["negotiate"] = False
        if owners is not None:
            return self.group.reduce_to_owners_init(tensors, self.op, owners=owners, **options)
        # A bucket is one buffer, whatever it holds.
        options |= {"algorithm": self.algorithm, "packed": True, "names": names}
        op = observed_copy(self.op) if observed else self.op
        return self.group.grouped_all_reduce_init(tensors, op, **options)

    @outside_modes()
    def reduce_sparse_async(self, name: str, parameter: Tensor, bucket: str) -> Reduction:
        """Start reducing a sparse gradient, which `wait` replaces; it is sent uncompressed.

        NotImplementedError: `op` is Adasum.
        """
        if self.op not in (Sum, Average):
            asked, other = f"{self.op} is not defined", ", or method='delta'"
            if self.op.ordered:
                asked, other = "there is no sum of order='tree'", ""
            raise NotImplementedError(
                f"the gradient of {name} is sparse, of which {asked}: pass "
                f"sparse_as_dense=True{other}"
            )
        gradient = parameter.grad
        assert gradient is not None
        if self.prescale != 1.0:
            gradient = gradient * self.prescale
        # Ranks compare names: where one has no gradient, this one is in the error.
        call = (
            f"{bucket}: sparse gradient of {name} (a rank without one needs sparse_as_dense=True)"
        )
        handle = sparse_all_reduce_async(self.group, gradient, self.op, call)

        def install(result: Tensor) -> None:
            parameter.grad = result * self.postscale if self.postscale != 1.0 else result

        return Reduction(handle.wait, install)
