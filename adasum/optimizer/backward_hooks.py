"""Hooks on the gradients: they start each bucket's reduction as soon as backward completes it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from adasum.optimizer.bucket_reduction import Reduction
from adasum.optimizer.parameters import Named, by_kind
from collectives import CollectiveError, TransportError
from collectives.trace import span

# Not public, but the only way to be called when backward ends; torch's DDP uses it too.
_engine = torch.autograd.Variable._execution_engine


class OptimizerOrderError(RuntimeError, AssertionError):
    """backward, zero_grad, synchronize and step were called in an order that loses gradients.

    Also an AssertionError, which is what Horovod raises for the same mistakes.
    """


StartBucket: TypeAlias = Callable[[Sequence[Named], str], Sequence[Reduction]]

# The optimizers that reduce a parameter's gradient while backward runs.
_owners: MutableMapping[Tensor, list[weakref.ref[BackwardHooks]]] = WeakIdKeyDictionary()


class _Bucket(NamedTuple):
    number: int
    name: str
    members: Sequence[Named]


class BackwardHooks:
    """Counts backward passes, and starts each bucket's reduction once a step.

    A bucket is complete when each of its trainable parameters has seen `passes` backward passes
    since `restart`. Buckets are started in one order on every rank: a complete one waits for those
    before it. Hooks may run in any of autograd's threads.

    Args:
        named: (name, parameter) of every parameter, in registration order.
        buckets: The same pairs, divided into buckets in the order in which they start.
        start_bucket: Called with a bucket's (name, parameter) pairs and its name; returns the
            started reductions, none where there is nothing to reduce.
        passes: Backward passes of a step.
        early: Start buckets while backward runs, and not only in `synchronize`.
        final: Let backward return only when what it started is done, so that the gradients it
            leaves are final.
        finish: Called when all buckets of a step are reduced, at the same point on every rank, so
            that it may call collectives.
    """

    def __init__(
        self,
        named: Sequence[Named],
        buckets: Sequence[Sequence[Named]],
        start_bucket: StartBucket,
        *,
        passes: int,
        early: bool,
        final: bool,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.passes = passes
        self._start_bucket = start_bucket
        self._early = early
        self._final = final
        self._finish = finish
        self._lock = threading.RLock()
        self._names: dict[Tensor, str] = {}
        self._counts: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._hooked: set[Tensor] = set()
        self._in_flight: list[Reduction] = []
        self.restart()
        self.add(named, buckets)

    @property
    def named(self) -> list[Named]:
        """(name, parameter) of every parameter, in registration order."""
        return [(name, parameter) for parameter, name in self._names.items()]

    @property
    def busy(self) -> bool:
        """Whether a started reduction has not been waited for."""
        return bool(self._in_flight)

    def add(self, named: Sequence[Named], buckets: Sequence[Sequence[Named]]) -> None:
        """Add new parameters, whose buckets come after all others.

        Gradients that they have already are reduced in this step.
        """
        with self._lock:
            self.synchronized = False
            for name, parameter in named:
                self._names[parameter] = name
                self._counts[parameter] = 0
            for members in buckets:
                number = len(self._buckets)
                name = f"bucket {number}: {members[0][0]} to {members[-1][0]}"
                bucket = _Bucket(number, name, members)
                self._buckets.append(bucket)
                self._bucket_of.update((parameter, bucket) for _, parameter in members)
            self._hook_trainable()

    def reached(self, parameter: Tensor) -> bool:
        """Return whether backward has produced the parameter's gradient since `restart`."""
        return self._counts[parameter] > 0

    def restart(self) -> None:
        """Begin a new step: no passes are counted and no bucket is started yet."""
        with self._lock:
            self._counts = dict.fromkeys(self._counts, 0)
            self._num_started = 0
            self._done: list[Reduction] = []
            self.synchronized = False
            self._callback_queued = False
            self._hook_trainable()

    def synchronize(self, max_in_flight: int | None = None) -> None:
        """Start the remaining buckets, in order, and wait for all; a second call does nothing.

        Args:
            max_in_flight: Wait for the first bucket where more would be in flight.

        Raises:
            CollectiveError: A reduction failed; nothing is in flight any more.
        """
        if self.synchronized:
            return
        with self._discarding():
            self._start_remaining(max_in_flight)
        self.wait()
        # Only now, because observers may call collectives: how many buckets backward starts and
        # waits for may differ between the ranks.
        while self._done:
            self._done.pop(0).notify_observer()
        self._finish()
        self.synchronized = True

    def wait(self) -> None:
        """Wait for what was started; raise the first error once nothing is in flight."""
        if not self._in_flight:
            return
        with span(lambda: f"waiting for {len(self._in_flight)} buckets"), self._discarding():
            while self._in_flight:
                first = self._in_flight.pop(0)
                first.wait()
                self._done.append(first)

    def _start_remaining(self, max_in_flight: int | None) -> None:
        with self._lock:
            while self._num_started < len(self._buckets):
                self._start_next()
                if max_in_flight is not None and len(self._in_flight) > max_in_flight:
                    first = self._in_flight.pop(0)
                    first.wait()
                    first.notify_observer()
            # Without early starts the buckets above have held these, too.
            for members in by_kind(self._unhooked()) if self._early else ():
                self._start(members, f"made trainable since the last step: {members[0][0]}...")

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """On an error wait for what is in flight, drop its results, and note its errors."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                reductions, self._in_flight = self._in_flight, []
            for reduction in reductions:
                try:
                    reduction.wait_for_result()
                except Exception as other:  # noqa: BLE001 - told along with the first
                    if other is not error:
                        _add_note(error, f"after it: {type(other).__name__}: {other}")
            raise

    def _unhooked(self) -> list[Named]:
        """Return the trainable parameters without a hook: made trainable since `restart`."""
        return [(n, p) for n, p in self.named if p.requires_grad and p not in self._hooked]

    def _hook_trainable(self) -> None:
        me = weakref.ref(self)
        for _, parameter in self._unhooked():
            self._hooked.add(parameter)
            handle = parameter.register_post_accumulate_grad_hook(_hook(me))
            # A hook must not keep a dropped optimizer alive, nor go on counting for it.
            weakref.finalize(self, handle.remove)
            if self._early:
                others = [other for other in _owners.get(parameter, ()) if other() is not None]
                _owners[parameter] = [*others, me]

    def _complete(self, bucket: _Bucket) -> bool:
        # From the last, which backward most often reaches last, so that an incomplete bucket is
        # most often found by one comparison.
        return all(
            self._counts[parameter] >= self.passes
            for _, parameter in reversed(bucket.members)
            if parameter.requires_grad and parameter in self._hooked
        )

    def _on_gradient(self, parameter: Tensor) -> None:
        self._refuse_sharing(parameter)
        with self._lock:
            self._counts[parameter] += 1
            self._refuse_untimely(parameter)
            if not self._early or self._counts[parameter] < self.passes:
                return
            waiting = self._buckets[self._num_started :]
            for _ in takewhile(self._complete, waiting):
                self._start_next()
                self._queue_callback()

    def _refuse_sharing(self, parameter: Tensor) -> None:
        if any(other() not in (None, self) for other in _owners.get(parameter, ())):
            raise OptimizerOrderError(
                f"the gradient of {self._names[parameter]} would be reduced twice, by two "
                "optimizers that DistributedOptimizer returned: give each its own parameters, or "
                "drop the first (del) before the second is made"
            )

    def _refuse_untimely(self, parameter: Tensor) -> None:
        """Raise OptimizerOrderError for a gradient that comes too often or too late."""
        name, bucket = self._names[parameter], self._bucket_of[parameter]
        if self._counts[parameter] > self.passes:
            raise OptimizerOrderError(
                f"the gradient of {name} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): raise "
                "backward_passes_per_step to accumulate gradients, or call step() between (of "
                "the optimizer that DistributedOptimizer returned)"
            )
        if self.synchronized or bucket.number < self._num_started:
            when = "synchronize()" if self.synchronized else f"{bucket.name} was sent"
            raise OptimizerOrderError(
                f"the gradient of {name} was computed after {when} and before step(): it would be "
                "left out of the reduction"
            )

    def _queue_callback(self) -> None:
        """Once a backward, ask autograd's engine for a call at its end, as torch's DDP does."""
        if self._final and not self._callback_queued:
            self._callback_queued = True
            _engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        if self._num_started == len(self._buckets) and not self._unhooked():
            self.synchronize()
        else:
            self.wait()

    def _start_next(self) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        members = bucket.members
        if self._early:
            members = [entry for entry in members if entry[1] in self._hooked]
        self._start(members, bucket.name)

    def _start(self, members: Sequence[Named], name: str) -> None:
        if not members:
            return
        try:
            self._in_flight += self._start_bucket(members, name)
        except TransportError as error:
            # The group failed in a bucket before this one, of which nobody has been told yet.
            if self._in_flight and isinstance(error.__cause__, CollectiveError):
                raise error.__cause__ from None
            raise


def _hook(owner: weakref.ref[BackwardHooks]) -> Callable[[Tensor], None]:
    def on_gradient(parameter: Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._on_gradient(parameter)

    return on_gradient


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
