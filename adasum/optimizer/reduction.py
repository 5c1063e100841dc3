"""Reductions of a bucket's tensors: packed, compressed by a user's class, or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.observer import ObservedGram, Observer, observe
from adasum.optimizer.bucket import Counts, Part
from adasum.reducer import AdasumReducer, gives_gram, observed_copy
from adasum.request_pool import RequestPool
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, Group, Reducer, Request, Sum
from collectives.modes import outside_modes
from collectives.schedules.levels import runs_on_nodes


@dataclass
class Reduction:
    """A started reduction of a whole bucket or a part of it.

    `wait` blocks until the reduction has ended and no longer uses the sent memory, or raises its
    error; `install` copies the result to its destination; `show` shows it to the observer, in one
    order on all ranks. The argument of both is the value that `wait` returned.
    """

    wait: Callable[[], Any]
    install: Callable[[Any], None]
    show: Callable[[Any], None] = lambda _: None


@dataclass
class BucketReducer:
    """Reduces an optimizer's buckets, with settings that all its reductions share.

    `algorithm` is an algorithm of `collectives`; `prescale` multiplies tensors when they are
    packed, `postscale` when they are unpacked.
    """

    group: Group
    op: Reducer
    compression: type[Compressor] = Compression.none
    algorithm: str | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    observer: Observer | None = None
    _requests: RequestPool = field(default_factory=RequestPool)

    @property
    def casts(self) -> bool:
        """Whether packing can do the compression: at most a cast."""
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    @property
    def counts(self) -> Counts | None:
        """A function that divides a vector of counts for the reduction; None if ranks cannot count.

        The result may be 0 only if the counts of all ranks are 0. That holds for sums and averages,
        and for Adasum of single numbers that are not negative.
        """
        if not self.casts:
            return None
        if isinstance(self.op, AdasumReducer):
            return lambda counts: list(counts.split(1))
        return (lambda counts: [counts]) if self.op in (Sum, Average) or self.op.ordered else None

    def buffer(self, nbytes: int, like: Tensor) -> Tensor | None:
        """Return memory that all ranks' GPUs share, for buckets of tensors like this; collective.

        None if this reduction has no kernel for shared memory, or the GPUs cannot share any.
        """
        free = self.casts and self.algorithm in (None, "auto")
        if not free or not runs_on_nodes(self.op, like.dtype, self.group.topology):
            return None
        return self.group.buffer(nbytes, like.device)

    def start(self, part: Part, install: Callable[[Any], None]) -> Reduction:
        """Start reducing a packed part."""
        options: dict[str, Any] = {"packed": True, "algorithm": self.algorithm}
        size = len(part.records)
        gives = self.observer is not None and part.owners is None
        by_gram = gives and gives_gram(self.observer, self.op, self.group, part.sent, **options)
        show = observe(self.observer, part.names[:size], part.tensors, by_gram=by_gram)
        make = partial(self._request, part, options, observed=by_gram)
        started = self._requests.start(part, (self.op, part.owners, by_gram), make)
        return Reduction(started.wait, install, lambda gram: show(_of_first(size, gram)))

    def _request(self, part: Part, options: dict[str, Any], *, observed: bool) -> Request[Any]:
        # Without negotiation: other ranks may have joined, or already have a request for theirs.
        if part.owners is not None:
            return self.group.reduce_to_owners_init(
                part.slots, self.op, owners=part.owners, name=part.name, negotiate=False
            )
        op = observed_copy(self.op) if observed else self.op
        return self.group.grouped_all_reduce_init(
            part.sent, op, name=part.name, names=part.names, negotiate=False, **options
        )

    def start_compressed(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        bucket: str,
        install: Callable[[Any], None],
    ) -> Reduction:
        """Start reducing tensors in place, with each compressed by a user's class."""
        show = observe(self.observer, names, tensors, by_gram=False)
        compressed = [self.compression.compress(tensor) for tensor in tensors]
        sent = [each.contiguous() for each, _ in compressed]
        options: Any = {"prescale": self.prescale, "postscale": self.postscale}
        work = self.group.grouped_all_reduce(
            sent, self.op, name=bucket, algorithm=self.algorithm, async_op=True, **options
        )

        def decompress(result: Any) -> None:
            for tensor, each, (_, context) in zip(tensors, sent, compressed, strict=True):
                tensor.copy_(self.compression.decompress(each, context))
            install(result)

        return Reduction(work.wait, decompress, lambda _: show(None))

    @outside_modes()
    def start_sparse(
        self, name: str, gradient: Tensor, bucket: str, install: Callable[[Tensor], None]
    ) -> Reduction:
        """Start reducing a sparse gradient, which is sent uncompressed; `wait` returns the result.

        Raises NotImplementedError unless `op` is Sum or Average without an order.
        """
        if self.op not in (Sum, Average):
            asked, other = f"{self.op} is not defined", ", or method='delta'"
            if self.op.ordered:
                asked, other = "there is no sum of order='tree'", ""
            raise NotImplementedError(
                f"the gradient of {name} is sparse, of which {asked}: pass "
                f"sparse_as_dense=True{other}"
            )
        if self.prescale != 1.0:
            gradient = gradient * self.prescale
        # Ranks compare names: if another rank has no gradient, the error contains this name.
        call = (
            f"{bucket}: sparse gradient of {name} (a rank without one needs sparse_as_dense=True)"
        )
        handle = sparse_all_reduce_async(self.group, gradient, self.op, call)
        scale = self.postscale
        return Reduction(lambda: handle.wait() * scale if scale != 1.0 else handle.wait(), install)


def empty_sparse(parameter: Tensor, sparse_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a sparse gradient without entries."""
    shape, device = parameter.shape, parameter.device
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse_dim:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, device=device)


def _of_first(count: int, gram: ObservedGram | None) -> ObservedGram | None:
    """Return the Gram matrices of the first `count` tensors, without the counts behind them."""
    return gram and gram._replace(
        products=gram.products[:count],
        coefficients=gram.coefficients[:count],
        spread=gram.spread[:count],
    )
