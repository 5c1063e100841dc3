"""Hooks on gradients, which start each bucket as soon as backward has completed it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.bucket import Bucket
from adasum.optimizer.errors import (
    OptimizerOrderError,
    given_too_late,
    reduced_twice,
    too_late,
    too_many_passes,
)
from adasum.optimizer.pass_tree import PassTree
from adasum.optimizer.planning import Named
from adasum.optimizer.record import Record
from adasum.optimizer.reduction import Reduction
from collectives import CollectiveError, TransportError
from collectives.modes import outside_modes, untraced
from collectives.recorder import span

# Not public, but the only way to be called when backward ends; torch's DDP uses it too.
_engine = torch.autograd.Variable._execution_engine
# All living instances by id, to find optimizers that have a parameter in common.
_live: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()


class Backward:
    """Counts backward passes, and starts each bucket once per step.

    Hooks may run in any of autograd's threads. The method of reduction is held weakly: dropping the
    optimizer drops this object and its hooks.

    Args:
        method: The `Method` that packs, reduces and unpacks.
        named: (name, parameter) of every parameter, in registration order.
        plan: The same pairs in the order of their reductions, bucket by bucket.
        passes: The number of backward passes per step.
        early: Whether buckets start while backward runs, and not only in `synchronize`.
        tree: Adds the gradients of several passes in place of autograd, if there is an order.
    """

    def __init__(
        self,
        method: Any,
        named: Sequence[Named],
        plan: Sequence[Sequence[Named]],
        *,
        passes: int,
        early: bool,
        tree: PassTree | None,
    ) -> None:
        self.passes, self.early, self.tree = passes, early, tree
        self._method = weakref.ref(method)
        # Gradients of one backward may come in several threads, and the start of buckets may run
        # another backward in the same thread.
        self._lock = threading.RLock()
        # Reductions not waited for yet, oldest first, and functions that show the finished ones.
        self._in_flight: list[Reduction] = []
        self._unseen: list[Callable[[], None]] = []
        self.records: dict[Tensor, Record] = {}
        self.buckets: list[Bucket] = []
        self.in_step = False
        self.restart()
        for reference in _live.valuerefs():
            other = reference()
            for _, parameter in named:
                if other is not None and parameter in other.records:
                    other.records[parameter].newer = weakref.ref(self)
        _live[id(self)] = self
        self.rebuild(named, plan)

    def __del__(self) -> None:
        for record in self.records.values():
            if record.handle is not None:
                record.handle.remove()

    @property
    def busy(self) -> bool:
        """Whether any started reduction has not been waited for."""
        return bool(self._in_flight)

    def named(self) -> list[Named]:
        """Return (name, parameter) of every parameter, in registration order."""
        return [(record.name, parameter) for parameter, record in self.records.items()]

    def rebuild(self, named: Sequence[Named], plan: Sequence[Sequence[Named]]) -> None:
        """Replace the parameters and buckets, from the next step on."""
        before, self.records = self.records, {}
        for name, parameter in named:
            record = before.pop(parameter, None)
            if record is None:
                record = Record(name)
                record.handle = self._hook(parameter, record)
            self.records[parameter] = record
        for gone in before.values():
            gone.handle.remove()
        self.buckets = []
        for number, part in enumerate(plan):
            members = [(self.records[parameter], parameter) for _, parameter in part]
            self.buckets.append(Bucket(number, members))
            for record, _ in members:
                record.bucket = number

    def _hook(self, parameter: Tensor, record: Record) -> Any:
        """Put a hook on a parameter, which may be frozen now and trainable later."""
        reference = weakref.ref(self)

        # Compiled autograd traces hooks; this one waits for other ranks.
        @untraced
        def on_gradient(parameter: Tensor) -> None:
            backward = reference()
            if backward is not None:
                backward._on_gradient(parameter, record)

        trainable = parameter.requires_grad
        if not trainable and not (parameter.is_floating_point() or parameter.is_complex()):
            return torch.utils.hooks.RemovableHandle({})
        parameter.requires_grad_(True)
        handle = parameter.register_post_accumulate_grad_hook(on_gradient)
        parameter.requires_grad_(trainable)
        return handle

    def restart(self) -> None:
        """Begin a new step: reset the counts of passes and started buckets."""
        with self._lock:
            for record in self.records.values() if self.in_step else ():
                record.seen, record.active = 0, False
            self.in_step = self._in_pass = self.synchronized = self._failed = False
            # An interrupted backward never runs the callback that it queued.
            self._keeps = self._callback_queued = False
            self._num_started = 0
            self._unseen.clear()
            if self.tree is not None:
                self.tree.restart()

    def note_left(self) -> None:
        """Note the gradients that remain after the step."""
        for parameter, record in self.records.items():
            gradient = parameter.grad
            if gradient is None or gradient.is_inference():
                record.left = None
            else:
                record.left = weakref.ref(gradient), gradient._version

    def forget_left(self) -> None:
        """Forget the gradients noted after the last step: they are zeroed."""
        for record in self.records.values():
            record.left = None

    # Called by backward.

    def _on_gradient(self, parameter: Tensor, record: Record) -> None:
        # If there is no gradient, an earlier hook has taken it away, to give it back later.
        taken = record.newer is not None and record.newer() is not None
        if parameter.grad is None or taken:
            return
        with self._lock:
            record.left = None
            if not self._in_pass:
                self._begin_pass()
            record.seen += 1
            tree = self.tree
            if tree is not None and tree.ended >= self.passes > 1:
                raise too_many_passes(record.name, self.passes)
            if not self._callback_queued and (self.early or tree is not None):
                self._callback_queued = True
                _engine.queue_callback(self._on_backward_end)
            if not self.early:
                return
            bucket = self.buckets[record.bucket]
            if record.seen > self.passes:
                raise too_many_passes(record.name, self.passes)
            if record.bucket < self._num_started:
                when = "all were reduced" if self.synchronized else f"{bucket.name} was sent"
                raise too_late(record.name, when)
            if record.seen == self.passes:
                bucket.waiting -= 1
                if not bucket.waiting:
                    rest = self.buckets[self._num_started :]
                    for each in takewhile(lambda each: not each.waiting, rest):
                        self._start(each)

    def _begin_pass(self, seen: bool = True) -> None:
        """Find the parameters that take part, at the first gradient of each backward."""
        self._in_pass = True
        method = self._alive()
        if not self.in_step:
            method.follow_groups()
            self.in_step = True
        for bucket in self.buckets:
            bucket.waiting = 0
            for record, parameter in bucket.members:
                trainable = parameter.requires_grad
                if not record.active and (trainable or parameter.grad is not None):
                    # Without a backward since the last step, gradients are already reduced.
                    if (trainable and seen) or not method.is_left(parameter, record):
                        record.active = True
                    self._keeps |= trainable and not record.active
                if trainable and record.seen < self.passes:
                    bucket.waiting += 1

    # Autograd calls this like hooks: torch.compile would trace it in a compiled step.
    @untraced
    def _on_backward_end(self) -> None:
        """End a pass of the tree; wait, so that gradients are final when backward returns."""
        self._callback_queued = self._in_pass = False
        method = self._method()
        if method is None:
            return
        if self.tree is not None and self.passes > 1:
            with self._lock:
                method.densify()
                self.tree.end_pass(self.records, self.passes)
        if not self.early or not method.final:
            return
        if self._num_started == len(self.buckets):
            self.synchronize()
        else:
            self._wait()

    # Called by the optimizer.

    def synchronize(self, max_in_flight: int | None = None) -> None:
        """Start the remaining buckets, in order, and wait; a second call does nothing.

        With `max_in_flight` it waits for the oldest bucket if more would be in flight.

        Raises:
            CollectiveError: A reduction failed; nothing is in flight any more.
        """
        if self.synchronized:
            return
        method = self._alive()
        with self._none_after_an_error():
            with self._lock:
                if not self.in_step:
                    self._begin_pass(seen=False)
                if self._keeps:
                    method.agree_on_kept()
                while self._num_started < len(self.buckets):
                    self._start(self.buckets[self._num_started])
                    if max_in_flight is not None:
                        self._wait(below=max_in_flight + 1)
                        self._notify_observers()
            self._wait()
        self._notify_observers()
        method.finish()
        self.synchronized = True

    def leave_out(self) -> None:
        """Before a batch is left out, reduce it if other ranks' backward may wait for it."""
        left = self._num_started < len(self.buckets) and not self._failed
        if not (self.early and self.in_step and left):
            return
        if any(record.seen >= self.passes for record in self.records.values()):
            self.synchronize()

    def refuse_taken_over(self) -> None:
        """Raise OptimizerOrderError if a newer optimizer has a parameter of this one.

        Optimizers that both reduce in step() may share parameters: they reduce in turn.
        """
        for record in self.records.values():
            newer = None if record.newer is None else record.newer()
            if newer is not None and (self.early or newer.early):
                raise reduced_twice(record.name)

    def refuse_too_many(self) -> None:
        """Raise OptimizerOrderError if there were more backward passes than `passes`.

        If buckets start in backward, the hooks have already checked it. Otherwise a gradient may
        come in parts and be counted several times, for example if reentrant checkpoints share a
        layer. So the smallest count decides.
        """
        reached = [record for record in self.records.values() if record.seen]
        if not self.early and reached and min(each.seen for each in reached) > self.passes:
            raise too_many_passes(reached[0].name, self.passes)

    def refuse_given_late(self, parameters: Iterable[Tensor]) -> None:
        """Raise OptimizerOrderError for an unreduced gradient that step() would use."""
        method = self._alive()
        for parameter in parameters:
            record = self.records.get(parameter)
            if parameter.grad is None or (record is not None and record.active):
                continue
            if record is None or not method.is_left(parameter, record):
                raise given_too_late("a new parameter" if record is None else record.name)

    # Reductions.

    def _start(self, bucket: Bucket) -> None:
        """Start a bucket's reductions, if any of its members takes part."""
        self._num_started += 1
        method = self._alive()
        members = bucket.active()
        if self.tree is not None:
            self.tree.finish([parameter for _, parameter in members], self.passes)
        if not members or method.settings.one_rank:
            return
        try:
            method.check_parameters()
            with torch.no_grad():
                self._in_flight += method.start(bucket, members)
        except CollectiveError as error:
            self._failed = True
            # The group failed in an earlier bucket, which has not been waited for yet.
            cause = error.__cause__
            if (
                self.busy
                and isinstance(error, TransportError)
                and isinstance(cause, CollectiveError)
            ):
                raise cause from None
            raise

    def _wait(self, below: int = 1) -> None:
        """Wait for the oldest reductions until fewer than `below` are in flight.

        Raises the CollectiveError of the first that failed; nothing is in flight then.
        """
        if len(self._in_flight) < below:
            return
        with (
            span(lambda: f"waiting for {len(self._in_flight)} buckets"),
            self._none_after_an_error(),
        ):
            while len(self._in_flight) >= below:
                first = self._in_flight.pop(0)
                result = first.wait()
                with torch.no_grad(), outside_modes():
                    first.install(result)
                self._unseen.append(partial(first.show, result))

    def _notify_observers(self) -> None:
        """Show the finished reductions to the observer, at the same points on every rank.

        `_wait` does not: observers may call collectives, and the number of buckets that backward
        starts and waits for may differ between ranks.
        """
        while self._unseen:
            self._unseen.pop(0)()

    @contextmanager
    def _none_after_an_error(self) -> Iterator[None]:
        """On an error, wait for all reductions in flight, drop results, and add notes of errors."""
        try:
            yield
        except BaseException as error:
            self._failed |= isinstance(error, CollectiveError)
            started, self._in_flight = self._in_flight, []
            for reduction in started:
                try:
                    reduction.wait()
                except Exception as other:  # noqa: BLE001 - a note of the first
                    if other is not error and hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"after it: {type(other).__name__}: {other}")
            raise

    def _alive(self) -> Any:
        method = self._method()
        if method is None or method.is_dropped:
            raise OptimizerOrderError(
                "the optimizer that DistributedOptimizer returned was dropped, and the one passed "
                "to it reduces nothing: keep it, as in optimizer = DistributedOptimizer(optimizer)"
            )
        return method
