"""Started reductions: what they have in common, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.modes import outside_modes
from adasum.observer import ObservedGram, Observer, observe
from adasum.optimizer.bucket import Counts, Part
from adasum.reducer import AdasumReducer, gives_gram, observed_copy
from adasum.request_pool import RequestPool, StartedRequest
from adasum.sparse import sparse_all_reduce_async
from collectives import Average, Group, Reducer, Request, Sum
from collectives.recorder import span


@dataclass
class Reduction:
    """A started reduction of a bucket, or of a part of one.

    `wait` blocks until the reduction is done, so that nothing uses the memory that was sent, or
    raises what went wrong; `install` puts the result where it belongs; `show` shows it to the
    observer, in one order on all ranks.
    """

    wait: Callable[[], Any]
    install: Callable[[Any], None]
    show: Callable[[], None] = lambda: None


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
                result = first.wait()
                with torch.no_grad(), outside_modes():
                    first.install(result)
                self._done.append(first)

    def notify_observers(self) -> None:
        """Show what was waited for; called at the same points on every rank.

        Not by `wait`: an observer may call collectives, and how many buckets backward starts and
        waits for may differ between the ranks.
        """
        while self._done:
            self._done.pop(0).show()

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
                    reduction.wait()
                except Exception as other:  # noqa: BLE001 - a note of the first
                    if other is not error and hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"after it: {type(other).__name__}: {other}")
            raise


@dataclass
class BucketReducer:
    """Reduces an optimizer's buckets: what all its reductions have in common.

    `algorithm` is as `collectives` takes it; `prescale` multiplies what is packed, `postscale` what
    is unpacked.
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
        """Whether packing does what the compression does: nothing, or a cast."""
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    @property
    def counts(self) -> Counts | None:
        """How counts of ranks go with the tensors, if their reduction is 0 only for zeros.

        That holds for sums and averages, and for Adasum of single numbers that are not negative.
        """
        if not self.casts:
            return None
        if isinstance(self.op, AdasumReducer):
            return lambda counts: list(counts.split(1))
        return (lambda counts: [counts]) if self.op in (Sum, Average) or self.op.ordered else None

    def start(self, part: Part, names: Sequence[str]) -> Reduction:
        """Start reducing a part that is packed; its owner's `install` comes behind the result."""
        options: dict[str, Any] = {"packed": True, "algorithm": self.algorithm}
        gives = self.observer is not None and part.owners is None
        by_gram = gives and gives_gram(self.observer, self.op, self.group, part.sent, **options)
        show = observe(self.observer, names, part.tensors, by_gram=by_gram)
        make = partial(self._request, part, options, observed=by_gram)
        key = self.op, part.owners, by_gram
        started: StartedRequest = self._requests.start(part, key, make)
        found: list[ObservedGram | None] = []

        def install(gram: ObservedGram | None) -> None:
            found.append(None if gram is None else _of_first(len(names), gram))

        return Reduction(started.wait, install, lambda: show(found.pop()))

    def _request(self, part: Part, options: dict[str, Any], *, observed: bool) -> Request[Any]:
        # Not negotiated with the other ranks, which may have joined, or see the memory for the
        # first time.
        if part.owners is not None:
            return self.group.reduce_to_owners_init(
                part.slots, self.op, owners=part.owners, name=part.name, negotiate=False
            )
        op = observed_copy(self.op) if observed else self.op
        return self.group.grouped_all_reduce_init(
            part.sent, op, name=part.name, names=part.names, negotiate=False, **options
        )

    def start_compressed(
        self, names: Sequence[str], tensors: Sequence[Tensor], bucket: str
    ) -> Reduction:
        """Start reducing tensors that a user's class compresses, each by itself, in place."""
        show = observe(self.observer, names, tensors, by_gram=False)
        compressed = [self.compression.compress(tensor) for tensor in tensors]
        sent = [each.contiguous() for each, _ in compressed]
        options: Any = {"prescale": self.prescale, "postscale": self.postscale}
        work = self.group.grouped_all_reduce(
            sent, self.op, name=bucket, algorithm=self.algorithm, async_op=True, **options
        )

        def install(_: Any) -> None:
            for tensor, result, (_, context) in zip(tensors, sent, compressed, strict=True):
                if result is not tensor:
                    tensor.copy_(self.compression.decompress(result, context))

        return Reduction(work.wait, install, lambda: show(None))

    @outside_modes()
    def start_sparse(self, name: str, gradient: Tensor, bucket: str) -> Reduction:
        """Start reducing a sparse gradient, which is sent uncompressed; `wait` returns the result.

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
        if self.prescale != 1.0:
            gradient = gradient * self.prescale
        # Ranks compare names: if one has no gradient, this one is in the error.
        call = (
            f"{bucket}: sparse gradient of {name} (a rank without one needs sparse_as_dense=True)"
        )
        handle = sparse_all_reduce_async(self.group, gradient, self.op, call)
        return Reduction(
            lambda: handle.wait() * self.postscale if self.postscale != 1.0 else handle.wait(),
            lambda _: None,
        )


def _of_first(count: int, gram: ObservedGram) -> ObservedGram:
    """Return the Gram matrices of the tensors alone, without those of the counts behind them."""
    return gram._replace(
        products=gram.products[:count],
        coefficients=gram.coefficients[:count],
        spread=gram.spread[:count],
    )
