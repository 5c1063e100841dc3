"""Hooks on the gradients: they give each bucket its turn as soon as backward has completed it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.bucket import Bucket
from adasum.optimizer.errors import (
    OptimizerOrderError,
    given_too_late,
    reduced_twice,
    swapped,
    too_late,
    too_many_passes,
)
from adasum.optimizer.planning import Named
from adasum.optimizer.record import COMPLETE, REDUCED, UNDER_WAY, WAITING, Record, version_of
from adasum.optimizer.reduction import InFlight
from collectives import CollectiveError, TransportError

# Not public, but the only way to be called when backward ends; torch's DDP uses it too.
_engine = torch.autograd.Variable._execution_engine
# Of all optimizers, by id, to find those that have a parameter in common.
_live: dict[int, weakref.ref[Backward]] = {}


class Backward:
    """Counts backward passes, and gives each bucket its turn once a step.

    Hooks may run in any of autograd's threads. The method of reduction is held weakly: who drops
    the optimizer drops this, and its hooks.

    Args:
        method: What packs, reduces and unpacks: a `Method`.
        named: (name, parameter) of every parameter, in registration order.
        plan: The same pairs in the order of their reductions, bucket by bucket.
        passes: Backward passes of a step.
        early: Whether buckets have their turn while backward runs, and not only in `synchronize`.
    """

    def __init__(
        self,
        method: Any,
        named: Sequence[Named],
        plan: Sequence[Sequence[Named]],
        *,
        passes: int,
        early: bool,
    ) -> None:
        self.passes, self.early = passes, early
        self._method = weakref.ref(method)
        # Gradients of one backward may come in several threads, and a bucket's start may begin
        # another backward in this one.
        self._lock = threading.RLock()
        self._in_flight = InFlight()
        self.records: dict[Tensor, Record] = {}
        self.buckets: list[Bucket] = []
        # Of parameters that have left the groups, until the next backward: they may come back.
        self._gone: dict[Tensor, Record] = {}
        self._handles: dict[Tensor, Any] = {}
        self._is_shared = self._has_tree = self.in_step = False
        self.restart()
        for reference in _live.copy().values():
            other = reference()
            if other is not None:
                other._note_newer(self, [parameter for _, parameter in named])
        _live[id(self)] = weakref.ref(self)
        self.rebuild(named, plan)

    def __del__(self) -> None:
        _live.pop(id(self), None)
        for handle in self._handles.values():
            handle.remove()

    @property
    def busy(self) -> bool:
        """Whether a started reduction has not been waited for."""
        return len(self._in_flight) > 0

    def named(self) -> list[Named]:
        """Return (name, parameter) of every parameter, in registration order."""
        return [(record.name, parameter) for parameter, record in self.records.items()]

    def rebuild(self, named: Sequence[Named], plan: Sequence[Sequence[Named]]) -> None:
        """Take these parameters, in these buckets, from the next step on."""
        before = {**self._gone, **self.records}
        self.records = {p: before.pop(p) if p in before else Record(name) for name, p in named}
        for name, parameter in named:
            self.records[parameter].name = name
        self._gone = before
        for parameter in before.keys() & self._handles.keys():
            self._handles.pop(parameter).remove()
        for parameter, record in self.records.items():
            if parameter not in self._handles:
                self._handles[parameter] = self._hook(parameter, record)
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
        @torch.compiler.disable
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

    def _note_newer(self, newer: Backward, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter in self.records:
                self.records[parameter].newer = weakref.ref(newer)
                self._is_shared = True

    def refuse_taken_over(self) -> None:
        """Raise OptimizerOrderError if a newer optimizer has a parameter of this one.

        Two that reduce what they have stepped may share it: they do so one after the other.
        """
        for record in self.records.values() if self._is_shared else ():
            newer = None if record.newer is None else record.newer()
            if newer is not None and (self.early or newer.early):
                raise reduced_twice(record.name)

    def restart(self) -> None:
        """Begin a new step: no passes are counted and no bucket has had its turn yet."""
        with self._lock:
            if self.in_step:
                for record in self.records.values():
                    record.seen, record.state, record.active = 0, WAITING, False
            self.in_step = self._in_pass = self.synchronized = self._failed = False
            # A backward that was interrupted has dropped its calls.
            self._keeps = self._callback_queued = self._pass_end_queued = False
            self._num_started = 0
            self._in_flight.forget_done()
            method = self._method()
            if method is not None and method.tree is not None:
                method.tree.restart()

    def note_left(self) -> None:
        """Note the gradients that a step leaves."""
        for parameter, record in self.records.items():
            gradient = parameter.grad
            record.added = False
            record.left = None if gradient is None else weakref.ref(gradient)
            record.version = None if gradient is None else version_of(gradient)

    def forget_left(self) -> None:
        """Forget what the last step has left, and who has gone since: gradients are zeroed."""
        self._gone.clear()
        for record in self.records.values():
            record.left, record.added = None, False

    def _on_gradient(self, parameter: Tensor, record: Record) -> None:
        gradient = parameter.grad
        # A hook ahead of this one has taken it away, to give it back later.
        if gradient is None or (record.newer is not None and record.newer() is not None):
            return
        with self._lock:
            if record.left is not None and self._is_stepped(record, gradient):
                return
            if not self._in_pass:
                self._begin_pass()
            record.seen += 1
            if self._has_tree:
                self._queue_pass_end(record)
            if not self.early:
                return
            if record.state is not WAITING or record.bucket < self._num_started:
                raise self._untimely(record)
            if not self._callback_queued:
                self._callback_queued = True
                _engine.queue_callback(self._on_backward_end)
            if record.seen == self.passes:
                record.state = COMPLETE
                bucket = self.buckets[record.bucket]
                bucket.waiting -= 1
                if not bucket.waiting:
                    for each in self.buckets[self._num_started :]:
                        if each.waiting:
                            break
                        self._start(each)

    def _is_stepped(self, record: Record, gradient: Tensor) -> bool:
        """Return whether a hook ahead of this one has stepped by the gradient; note additions."""
        if record.is_left(gradient):
            return True
        if record.left is not None and record.left() is gradient and record.version is not None:
            record.added = gradient._version == record.version + 1
        record.left = None
        return False

    def _untimely(self, record: Record) -> OptimizerOrderError:
        if record.seen > self.passes:
            return too_many_passes(record.name, self.passes)
        bucket = self.buckets[record.bucket]
        return too_late(
            record.name, "all were reduced" if self.synchronized else f"{bucket.name} was sent"
        )

    def _begin_pass(self, seen: bool = True) -> None:
        """Find out which parameters take part: at the first gradient of each backward."""
        self._in_pass = True
        method = self._alive()
        self._has_tree = method.tree is not None
        if not self.in_step:
            method.follow_groups()
            self.in_step = True
            if seen:
                self._gone.clear()
        for bucket in self.buckets:
            bucket.waiting = 0
            for record, parameter in bucket.members:
                trainable = parameter.requires_grad
                if not record.active and (trainable or parameter.grad is not None):
                    # Without a backward since the last step its gradients are reduced already.
                    if (trainable and seen) or not method.is_left(parameter, record):
                        record.active = True
                    self._keeps |= trainable and not record.active
                if trainable and record.state is WAITING:
                    bucket.waiting += 1

    # Autograd calls it, in a compiled step under torch.compile, as it does hooks.
    @torch.compiler.disable
    def _on_backward_end(self) -> None:
        """Wait for what was started, so that the gradients which backward leaves are final."""
        self._callback_queued = self._in_pass = False
        method = self._method()
        if method is None or not method.final:
            return
        if self._num_started == len(self.buckets):
            self.synchronize()
        else:
            with self._noting_failure():
                self._in_flight.wait()

    def _queue_pass_end(self, record: Record) -> None:
        """Ask for a call at the end of this pass, if passes are added by a tree."""
        tree = self._alive().tree
        if tree is None or self.passes == 1 or self._pass_end_queued:
            return
        if tree.ended >= self.passes:
            raise too_many_passes(record.name, self.passes)
        self._pass_end_queued = True
        _engine.queue_callback(self._on_pass_end)

    @torch.compiler.disable
    def _on_pass_end(self) -> None:
        method = self._method()
        with self._lock:
            self._pass_end_queued = False
            if method is not None and method.tree is not None:
                method.densify()
                method.tree.end_pass(self.records, self.passes)

    def synchronize(self, max_in_flight: int | None = None) -> None:
        """Give the remaining buckets their turns, in order, and wait; a second call does nothing.

        With `max_in_flight` it waits for the first bucket if more would be in flight.

        Raises:
            CollectiveError: A reduction failed; nothing is in flight any more.
        """
        if self.synchronized:
            return
        method = self._alive()
        with self._lock:
            if not self.in_step:
                self._begin_pass(seen=False)
        with self._noting_failure():
            with self._in_flight.none_after_an_error(), self._lock:
                if self._keeps:
                    method.agree_on_kept()
                while self._num_started < len(self.buckets):
                    self._start(self.buckets[self._num_started])
                    if max_in_flight is not None:
                        self._in_flight.wait(below=max_in_flight + 1)
                        self._in_flight.notify_observers()
            self._in_flight.wait()
        self._in_flight.notify_observers()
        for bucket in self.buckets:
            for record, _ in bucket.members:
                record.state = REDUCED
        method.finish()
        self.synchronized = True

    def leave_out(self) -> None:
        """Reduce what other ranks, whose backward may wait for it, need of a batch left out."""
        left = self._num_started < len(self.buckets)
        if self.early and self.in_step and left and not self._failed:
            done = any(record.seen >= self.passes for record in self.records.values())
            if done:
                self.synchronize()

    def refuse_too_many(self) -> None:
        """Raise OptimizerOrderError if there were more backward passes than `passes`.

        If buckets have their turn in backward that was found there. Otherwise a gradient may come
        in parts, as that of a layer that several reentrant checkpoints share, and be counted often:
        then others are not.
        """
        reached = [record for record in self.records.values() if record.seen]
        if not self.early and reached and min(each.seen for each in reached) > self.passes:
            raise too_many_passes(reached[0].name, self.passes)

    def refuse_given_late(self, parameters: Iterable[Tensor]) -> None:
        """Raise OptimizerOrderError for a gradient of this rank alone that step() would step by."""
        method = self._alive()
        for parameter in parameters:
            record = self.records.get(parameter)
            if parameter.grad is None or (record is not None and record.active):
                continue
            if record is None or not method.is_left(parameter, record):
                raise given_too_late("a new parameter" if record is None else record.name)

    def refuse_swapped(self) -> None:
        """Raise if torch has put other tensors behind the parameters, without their hooks."""
        if torch.__future__.get_swap_module_params_on_conversion():
            for parameter, record in self.records.items():
                if parameter.grad is not None and not record.seen and record.left is None:
                    raise swapped(record.name)

    def _start(self, bucket: Bucket) -> None:
        """Give a bucket its turn."""
        self._num_started += 1
        method = self._alive()
        members = bucket.active()
        for record, _ in members:
            record.state = UNDER_WAY
        if method.tree is not None:
            method.tree.finish([parameter for _, parameter in members], self.passes)
        if not members or method.settings.one_rank:
            return
        with self._noting_failure():
            method.check_parameters()
            try:
                with torch.no_grad():
                    self._in_flight.add(method.start(bucket, members))
            except TransportError as error:
                # The group failed in a bucket before this one, which nobody has waited for yet.
                if self.busy and isinstance(error.__cause__, CollectiveError):
                    raise error.__cause__ from None
                raise

    def _alive(self) -> Any:
        method = self._method()
        if method is None or method.is_dropped:
            raise OptimizerOrderError(
                "the optimizer that DistributedOptimizer returned was dropped, and the one given "
                "to it reduces nothing: optimizer = DistributedOptimizer(optimizer) keeps it"
            )
        return method

    @contextmanager
    def _noting_failure(self) -> Any:
        """Note that a reduction has failed, after which no rank waits for this one's others."""
        try:
            yield
        except CollectiveError:
            self._failed = True
            raise
