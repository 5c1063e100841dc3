"""Hooks on the gradients: they start each bucket's reduction as soon as backward completes it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasum.optimizer.buckets.kinds import same_state, state_of
from adasum.optimizer.buckets.planning import Named, by_kind
from adasum.optimizer.buckets.reduction import InFlight
from adasum.optimizer.errors import OptimizerOrderError, reduced_twice, too_late, too_many_passes
from adasum.optimizer.parameter_hooks import ParameterHooks
from adasum.optimizer.pass_tree import PassTree
from adasum.optimizer.reduces import Reduces
from collectives import CollectiveError, TransportError

# Not public, but the only way to be called when backward ends; torch's DDP uses it too.
_engine = torch.autograd.Variable._execution_engine

# The hooks of all optimizers that are still there. None of them holds a weak reference to a
# parameter, since torch refuses to swap tensors that somebody refers to so.
_live: dict[int, weakref.ref[BackwardHooks]] = {}
_numbers = count()


class _Bucket(NamedTuple):
    number: int
    name: str
    members: Sequence[Named]


class BackwardHooks:
    """Counts backward passes, and starts each bucket's reduction once a step.

    A bucket is complete when each of its trainable parameters has seen `passes` backward passes
    since `restart`. Buckets are started in one order on every rank: a complete one waits for those
    before it. Hooks may run in any of autograd's threads. Of several objects that are alive and
    have a parameter in common the newest reduces its gradient.

    The optimizer reduces as long as somebody holds it. `named` is in registration order, and
    `buckets` are the same pairs in the order in which they start. one_rank: count only, there is
    nobody to reduce with; early: start buckets while backward runs, and not only in `synchronize`;
    final: let backward return only when what it started is done, so that the gradients it leaves
    are final; before: whether to call the optimizer before backward gives a parameter its gradient;
    tree: adds the gradients of several passes, in place of autograd.
    """

    def __init__(
        self,
        optimizer: Reduces,
        named: Sequence[Named],
        buckets: Sequence[Sequence[Named]],
        *,
        passes: int,
        one_rank: bool = False,
        early: bool = False,
        final: bool = False,
        before: Callable[[Tensor], bool] = lambda _: False,
        tree: PassTree | None = None,
    ) -> None:
        self.passes = passes
        self._tree = tree
        self._pass_end_queued = False
        self._optimizer = weakref.ref(optimizer)
        self._one_rank = one_rank
        self._early = early
        self._final = final
        # Gradients of one backward may come in several threads, and a bucket's start may begin
        # another backward in this one.
        self._lock = threading.RLock()
        self.names: dict[Tensor, str] = {}
        self._counts: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        me = weakref.ref(self)
        self._hooks = ParameterHooks(_after(me), _before(me), before)
        # Those that the optimizer has no longer, until `restart`.
        self._gone: set[Tensor] = set()
        # The buckets of new parameters, from `restart` on.
        self._late: list[Sequence[Named]] = []
        self.synchronized = self.ended = False
        self._in_flight = InFlight()
        self._num_started = 0
        self._number = number = next(_numbers)
        _live[number] = weakref.ref(self, lambda _: _live.pop(number, None))
        self.restart()
        self.add(named, buckets)

    @property
    def named(self) -> list[Named]:
        """(name, parameter) of every parameter, in registration order."""
        return [(name, parameter) for parameter, name in self.names.items()]

    @property
    def busy(self) -> bool:
        """Whether a started reduction has not been waited for."""
        return len(self._in_flight) > 0

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of passes are kept here, which `restart` would drop."""
        return self._tree is not None and self._tree.holds_gradients

    def add(self, named: Sequence[Named], buckets: Sequence[Sequence[Named]]) -> None:
        """Add new parameters, whose buckets come after all others.

        Where those of this step have ended, they are reduced behind them, as what is left out.
        """
        with self._lock:
            self.synchronized = self.synchronized and not named
            for name, parameter in named:
                self.names[parameter] = name
                self._counts[parameter] = 0
                self._gone.discard(parameter)
            if self.ended:
                self._late += buckets
            else:
                self._append(buckets)
            self._hook_trainable()

    def _append(self, buckets: Iterable[Sequence[Named]]) -> None:
        for members in buckets:
            number = len(self._buckets)
            name = f"bucket {number}: {members[0][0]} to {members[-1][0]}"
            bucket = _Bucket(number, name, members)
            self._buckets.append(bucket)
            self._bucket_of.update((parameter, bucket) for _, parameter in members)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Leave these out from the next step on; at once where no bucket has been started."""
        with self._lock:
            self._gone = set(parameters)
            if not self._num_started:
                self._drop_gone()

    def _drop_gone(self) -> None:
        if not self._gone:
            return
        for parameter in self._gone:
            del self.names[parameter], self._counts[parameter]
            self._bucket_of.pop(parameter, None)
            self._hooks.remove(parameter)
        buckets = [[e for e in each.members if e[1] not in self._gone] for each in self._buckets]
        self._gone, self._buckets = set(), []
        self._append(members for members in buckets if members)

    def taken(self, parameter: Tensor) -> bool:
        """Return whether a reduction of the parameter's gradient was started since `restart`."""
        return parameter in self._taken

    @property
    def awaited(self) -> bool:
        """Whether another rank's backward, which has reached more, may wait for this rank."""
        if not self._early or self._one_rank or self._failed:
            return False
        left = self._num_started < len(self._buckets)
        return left and any(count >= self.passes for count in self._counts.values())

    @property
    def any_reached(self) -> bool:
        """Whether backward has produced any gradient since `restart`."""
        return any(self._counts.values())

    def reached(self, parameter: Tensor) -> bool:
        """Return whether backward has produced the parameter's gradient since `restart`."""
        return self._counts[parameter] > 0

    def restart(self) -> None:
        """Begin a new step: no passes are counted and no bucket is started yet."""
        with self._lock:
            self._num_started, self._failed = 0, False
            if self._tree is not None:
                self._tree.restart()
            # What has been handed to `start_bucket`; and what was reduced when backward returned.
            self._taken: set[Tensor] = set()
            self.reduced_in_backward: set[Tensor] = set()
            # Of a backward that has left something to be reduced: the gradients as it has left
            # them, what was trainable, and the name of a gradient that was changed afterwards.
            self._left: dict[Tensor, tuple[Any, ...]] = {}
            self._trained: set[Tensor] = set()
            self.changed = ""
            # Whether the buckets of this step are reduced; `synchronized`: and everything else.
            self.synchronized = self.ended = False
            late, self._late = self._late, []
            self._append(late)
            self._drop_gone()
            self._counts = dict.fromkeys(self._counts, 0)
            self._in_flight.forget_done()
            self._callback_queued = self._pass_end_queued = False
            self._hook_trainable()

    def synchronize(self, max_in_flight: int | None = None, in_backward: bool = False) -> None:
        """Start the remaining buckets, in order, and wait for all; a second call does nothing.

        What no bucket held follows in a round of its own: another rank's backward may have reached
        every parameter, and have ended the round of the buckets before there was anything else.
        With `max_in_flight` it waits for the first bucket where more would be in flight.
        CollectiveError: a reduction failed; nothing is in flight any more.
        """
        if self.synchronized and not self._left_out():
            return
        self.end_buckets(max_in_flight, in_backward)
        if self._left_out():
            self._reduce(self._start_left_out, in_backward)
        self.synchronized = True

    def end_buckets(self, max_in_flight: int | None = None, in_backward: bool = False) -> None:
        """Do what `synchronize` does, for the buckets alone."""
        if not self.ended:
            self._reduce(partial(self._start_remaining, max_in_flight), in_backward)
            self.ended = True

    def leave_out(self) -> None:
        """Reduce for other ranks, whose backward may wait for it, what this rank leaves out."""
        if self.awaited:
            self._left.clear()
            self.synchronize()

    def _reduce(self, start: Callable[[], None], in_backward: bool) -> None:
        """Reduce what `start` starts, and what is in flight."""
        left, self._left = self._left, {}
        if not in_backward:
            changed = (p for p, state in left.items() if not same_state(state, state_of(p.grad)))
            self.changed = self.changed or next((self.names[p] for p in changed), "")
        with self._noting_failure():
            with self._in_flight.none_after_an_error(), self._lock:
                start()
            self._in_flight.wait()
        self._in_flight.notify_observers()
        if in_backward:
            self.reduced_in_backward |= self._taken
        optimizer = self._optimizer()
        if optimizer is not None and not self._one_rank:
            optimizer._finish_reductions()

    def _start_remaining(self, max_in_flight: int | None) -> None:
        while self._num_started < len(self._buckets):
            self._start(*self._next_bucket())
            if max_in_flight is not None:
                self._in_flight.wait(below=max_in_flight + 1)
                self._in_flight.notify_observers()

    def _start_left_out(self) -> None:
        for members in by_kind(self._left_out()):
            self._start(members, f"not made by backward: {members[0][0]}...")

    def _left_out(self) -> list[Named]:
        """Return what no bucket of this step held, and is to be reduced.

        What was made trainable since `restart`, or given a gradient by somebody after its bucket
        was started. Buckets that are started in `synchronize` leave nothing out.
        """
        if not self._early:
            return []
        optimizer = self._optimizer()

        def wanted(p: Tensor) -> bool:
            return p.requires_grad or (optimizer is not None and optimizer._wants(p))

        return [(n, p) for n, p in self.named if p not in self._taken and wanted(p)]

    def _unhooked(self) -> list[Named]:
        """Return the trainable parameters without a hook: made trainable since `restart`."""
        return [(n, p) for n, p in self.named if p.requires_grad and p not in self._hooks]

    def _hook_trainable(self) -> None:
        if self._early:
            self._hooks.refuse_swapped(self.named)
        self._hooks.add([parameter for _, parameter in self._unhooked()])

    def _complete(self, members: Sequence[Named]) -> bool:
        # From the last, which backward most often reaches last, so that an incomplete bucket is
        # most often found by one comparison.
        return all(
            self._counts[parameter] >= self.passes
            for _, parameter in reversed(members)
            if parameter.requires_grad and parameter in self._hooks
        )

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter not in self._counts or self._newer(parameter):
            return
        if self._hooks.comes_again(parameter) or self._is_gone(parameter):
            return
        with self._lock:
            self._counts[parameter] += 1
            self._refuse_untimely(parameter)
            self._queue_pass_end(parameter)
            if not self._early:
                return
            self._queue_callback()
            if self._counts[parameter] >= self.passes:
                waiting = (bucket.members for bucket in self._buckets[self._num_started :])
                for _ in takewhile(self._complete, waiting):
                    self._start(*self._next_bucket())

    def _is_gone(self, parameter: Tensor) -> bool:
        """Return whether a hook ahead has taken the gradient away, or has stepped by it.

        As one that adds to gradients of its own does, which are given to the parameters later.
        """
        optimizer = self._optimizer()
        return parameter.grad is None or (optimizer is not None and optimizer._is_left(parameter))

    def _queue_pass_end(self, parameter: Tensor) -> None:
        """Where passes are added here, ask for a call at the end of this one."""
        if self._tree is None or self.passes == 1 or self._pass_end_queued:
            return
        if self._tree.ended >= self.passes:
            raise too_many_passes(self.names[parameter], self.passes)
        self._pass_end_queued = True
        _engine.queue_callback(self._on_pass_end)

    @torch.compiler.disable
    def _on_pass_end(self) -> None:
        optimizer = self._optimizer()
        with self._lock:
            self._pass_end_queued = False
            if self._tree is None or optimizer is None:
                return
            optimizer._densify(self.named)
            self._tree.end_pass(self.names, self.passes)

    def _newer(self, parameter: Tensor) -> list[BackwardHooks]:
        """Return the hooks of optimizers made later that have the parameter, too."""
        if len(_live) == 1:
            return []
        newer = [each() for number, each in _live.copy().items() if number > self._number]
        return [each for each in newer if each is not None and parameter in each._counts]

    def refuse_taken_over(self) -> None:
        """Raise OptimizerOrderError where a newer optimizer has a parameter of this one.

        Two that reduce what they have stepped may share it: they do so one after the other.
        """
        if len(_live) == 1:
            return
        for parameter, name in self.names.items():
            newer = self._newer(parameter)
            if newer and (self._early or any(each._early for each in newer)):
                raise reduced_twice(name)

    def refuse_too_many(self) -> None:
        """Raise OptimizerOrderError where there were more backward passes than `passes`.

        Where buckets start in backward that has been found there. Elsewhere a gradient may come in
        parts, as that of a layer that several reentrant checkpoints share, and be counted often:
        then others are not.
        """
        reached = {parameter: number for parameter, number in self._counts.items() if number}
        if not self._early and reached and min(reached.values()) > self.passes:
            raise too_many_passes(self.names[next(iter(reached))], self.passes)

    def _refuse_untimely(self, parameter: Tensor) -> None:
        """Raise OptimizerOrderError for a gradient that comes too often or too late."""
        name, bucket = self.names[parameter], self._bucket_of.get(parameter)
        if self._early and self._counts[parameter] > self.passes:
            raise too_many_passes(name, self.passes)
        if self.synchronized:
            raise too_late(name, "all were reduced")
        if bucket is not None and bucket.number < self._num_started:
            raise too_late(name, f"{bucket.name} was sent")

    def _queue_callback(self) -> None:
        """Once a backward, ask autograd's engine for a call at its end, as torch's DDP does."""
        if self._final and not self._callback_queued:
            self._callback_queued = True
            _engine.queue_callback(self._on_backward_end)

    # Autograd calls it, in a compiled step under torch.compile, as it does hooks.
    @torch.compiler.disable
    def _on_backward_end(self) -> None:
        self._callback_queued = False
        started = self._num_started == len(self._buckets)
        if started and not self._unhooked() and all(map(self._complete, self._late)):
            self.synchronize(in_backward=True)
        else:
            with self._noting_failure():
                self._in_flight.wait()
            self._note_left()

    def _note_left(self) -> None:
        """Note what backward has left, where a later call is to reduce some of it."""
        optimizer = self._optimizer()
        if optimizer is None or self._one_rank:
            return
        self.reduced_in_backward |= self._taken
        self._trained |= {parameter for parameter in self.names if parameter.requires_grad}
        optimizer._densify(self.named)
        given = [parameter for parameter in self.names if parameter.grad is not None]
        self._left = {parameter: state_of(parameter.grad) for parameter in given}

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Note that a reduction has failed, after which no rank waits for this one's others."""
        try:
            yield
        except CollectiveError:
            self._failed = True
            raise

    def _next_bucket(self) -> tuple[Sequence[Named], str]:
        """Return what is to be reduced of the next bucket, and its name."""
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        members = bucket.members
        if self._early:
            # As in backward, in which another rank may have started this bucket. One frozen since
            # has a gradient of this rank alone.
            hooked = [each for each in members if each[1] in self._hooks]
            members = [(n, p) for n, p in hooked if self._trains(p) or self.reached(p)]
        return members, bucket.name

    def _trains(self, parameter: Tensor) -> bool:
        return parameter in self._trained if self._trained else parameter.requires_grad

    def _start(self, members: Sequence[Named], name: str) -> None:
        self._taken.update(parameter for _, parameter in members)
        if self._tree is not None:
            self._tree.finish([parameter for _, parameter in members], self.passes)
        if not members or self._one_rank:
            return
        optimizer = self._optimizer()
        if optimizer is None:
            raise OptimizerOrderError(
                "the optimizer that DistributedOptimizer returned was dropped, and the one given "
                "to it reduces nothing: optimizer = DistributedOptimizer(optimizer) keeps it"
            )
        with self._noting_failure():
            optimizer._check_parameters()
            optimizer._densify(members)
            try:
                self._in_flight.add(optimizer._start_bucket(members, name))
            except TransportError as error:
                # The group failed in a bucket before this one, which nobody has waited for yet.
                if self.busy and isinstance(error.__cause__, CollectiveError):
                    raise error.__cause__ from None
                raise


def _after(owner: weakref.ref[BackwardHooks]) -> Callable[[Tensor], None]:
    # Compiled autograd traces hooks; this one waits for other ranks.
    @torch.compiler.disable
    def on_gradient(parameter: Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._on_gradient(parameter)

    return on_gradient


def _before(owner: weakref.ref[BackwardHooks]) -> Callable[[Tensor], None]:
    def before_gradient(parameter: Tensor) -> None:
        hooks = owner()
        optimizer = None if hooks is None else hooks._optimizer()
        if hooks is not None and optimizer is not None and not hooks._newer(parameter):
            optimizer._before_gradient(parameter)

    return before_gradient
