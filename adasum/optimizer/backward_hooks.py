"""Hooks on the gradients: they start each bucket's reduction as soon as backward completes it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from adasum.optimizer.buckets.planning import Named, by_kind
from adasum.optimizer.buckets.reduction import Reduction
from adasum.optimizer.errors import reduced_twice, swapped, too_late, too_many_passes
from collectives import CollectiveError, TransportError
from collectives.trace import span

# Not public, but the only way to be called when backward ends; torch's DDP uses it too.
_engine = torch.autograd.Variable._execution_engine


StartBucket: TypeAlias = Callable[[Sequence[Named], str], Sequence[Reduction]]

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
    before it. Hooks may run in any of autograd's threads.

    Of several that are alive and have a parameter in common the newest reduces its gradient.

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
        before: Called with a parameter on the CPU before backward gives it its gradient.
        wants: Where buckets start early: whether a parameter that is not trainable is to be reduced
            all the same, for a gradient that somebody has given it.

    Attributes:
        names: Of every parameter, in registration order.
        passes: As given.
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
        before: Callable[[Tensor], None] | None = None,
        wants: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self.passes = passes
        self._start_bucket = start_bucket
        self._early = early
        self._final = final
        self._finish = finish
        self._before = before
        self._wants = wants
        self._lock = threading.RLock()
        self.names: dict[Tensor, str] = {}
        self._counts: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._hooked: dict[Tensor, list[RemovableHandle]] = {}
        self._by_id: dict[int, Tensor] = {}
        # What accumulates a parameter's gradient: another where torch has swapped the parameter.
        self._accumulators: dict[Tensor, Node] = {}
        # Those that the optimizer has no longer, until `restart`.
        self._gone: set[Tensor] = set()
        self._in_flight: list[Reduction] = []
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
        return bool(self._in_flight)

    def add(self, named: Sequence[Named], buckets: Sequence[Sequence[Named]]) -> None:
        """Add new parameters, whose buckets come after all others.

        Gradients that they have already are reduced in this step.
        """
        with self._lock:
            self.synchronized = False
            for name, parameter in named:
                self.names[parameter] = name
                self._counts[parameter] = 0
                self._gone.discard(parameter)
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
            del self.names[parameter], self._counts[parameter], self._bucket_of[parameter]
            self._accumulators.pop(parameter, None)
            self._by_id.pop(id(parameter), None)
            for handle in self._hooked.pop(parameter, []):
                handle.remove()
        buckets = [[e for e in each.members if e[1] not in self._gone] for each in self._buckets]
        self._gone, self._buckets = set(), []
        self._append(members for members in buckets if members)

    def taken(self, parameter: Tensor) -> bool:
        """Return whether a reduction of the parameter's gradient was started since `restart`."""
        return parameter in self._taken

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
            self._num_started = 0
            # What has been handed to `start_bucket`.
            self._taken: set[Tensor] = set()
            self._drop_gone()
            self._counts = dict.fromkeys(self._counts, 0)
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
        if self.synchronized and not self._left_out():
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
            for members in by_kind(self._left_out()):
                self._start(members, f"not made by backward: {members[0][0]}...")

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

    def _left_out(self) -> list[Named]:
        """Return what no bucket of this step held, and is to be reduced.

        Made trainable since `restart`, or given a gradient by somebody, at whatever time: buckets
        may have started before that. Without early starts they hold all parameters.
        """
        if not self._early:
            return []
        others = [entry for entry in self.named if entry[1] not in self._taken]
        return [(n, p) for n, p in others if p.requires_grad or self._wants(p)]

    def _unhooked(self) -> list[Named]:
        """Return the trainable parameters without a hook: made trainable since `restart`."""
        return [(n, p) for n, p in self.named if p.requires_grad and p not in self._hooked]

    def _hook_trainable(self) -> None:
        me = weakref.ref(self)
        # Somebody who holds a parameter's accumulator holds on to the stream that it was made on.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps and self._early:
            self._refuse_swapped()
        for _, parameter in self._unhooked():
            handles = [parameter.register_post_accumulate_grad_hook(_hook(me))]
            if self._before is not None and parameter.is_cpu:
                self._by_id[id(parameter)] = parameter
                handles.append(parameter.register_hook(_hook_before(me, id(parameter))))
            self._hooked[parameter] = handles
            # A hook must not keep a dropped optimizer alive, nor go on counting for it.
            for handle in handles:
                weakref.finalize(self, handle.remove)
            if swaps:
                self._accumulators[parameter] = get_gradient_edge(parameter).node

    def _refuse_swapped(self) -> None:
        """Raise where torch has put other tensors behind the parameters, without their hooks."""
        for parameter, accumulator in self._accumulators.items():
            if parameter.requires_grad and get_gradient_edge(parameter).node != accumulator:
                raise swapped(self.names[parameter])

    def _complete(self, bucket: _Bucket) -> bool:
        # From the last, which backward most often reaches last, so that an incomplete bucket is
        # most often found by one comparison.
        return all(
            self._counts[parameter] >= self.passes
            for _, parameter in reversed(bucket.members)
            if parameter.requires_grad and parameter in self._hooked
        )

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter not in self._counts or self._newer(parameter):
            return
        with self._lock:
            self._counts[parameter] += 1
            self._refuse_untimely(parameter)
            if not self._early or self._counts[parameter] < self.passes:
                return
            waiting = self._buckets[self._num_started :]
            for _ in takewhile(self._complete, waiting):
                self._start_next()
                self._queue_callback()

    def _on_gradient_comes(self, number: int) -> None:
        """Call `before` once the accumulation itself begins.

        A parameter's hook is called by torch.autograd.grad, too, which accumulates nothing, and
        before hooks of users that look at its gradient. So its accumulator is asked, which is held
        no longer than backward needs it: it would insist on the parameter's shape.
        """
        parameter = self._by_id.get(number)
        if parameter is None or self._before is None or self._newer(parameter):
            return
        before = self._before

        def on_accumulation(_: object) -> None:
            handle.remove()
            before(parameter)

        handle = get_gradient_edge(parameter).node.register_prehook(on_accumulation)

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
        name, bucket = self.names[parameter], self._bucket_of[parameter]
        if self._early and self._counts[parameter] > self.passes:
            raise too_many_passes(name, self.passes)
        if self.synchronized or bucket.number < self._num_started:
            when = "synchronize()" if self.synchronized else f"{bucket.name} was sent"
            raise too_late(name, when)

    def _queue_callback(self) -> None:
        """Once a backward, ask autograd's engine for a call at its end, as torch's DDP does."""
        if self._final and not self._callback_queued:
            self._callback_queued = True
            _engine.queue_callback(self._on_backward_end)

    # Autograd calls it, in a compiled step under torch.compile, as it does hooks.
    @torch.compiler.disable
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
            # One frozen since backward has a gradient of this rank alone.
            members = [
                (name, parameter)
                for name, parameter in members
                if parameter in self._hooked
                and (parameter.requires_grad or self.reached(parameter))
            ]
        self._start(members, bucket.name)

    def _start(self, members: Sequence[Named], name: str) -> None:
        if not members:
            return
        self._taken.update(parameter for _, parameter in members)
        try:
            self._in_flight += self._start_bucket(members, name)
        except TransportError as error:
            # The group failed in a bucket before this one, of which nobody has been told yet.
            if self._in_flight and isinstance(error.__cause__, CollectiveError):
                raise error.__cause__ from None
            raise


def _hook(owner: weakref.ref[BackwardHooks]) -> Callable[[Tensor], None]:
    # Compiled autograd traces hooks; this one waits for other ranks.
    @torch.compiler.disable
    def on_gradient(parameter: Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._on_gradient(parameter)

    return on_gradient


def _hook_before(owner: weakref.ref[BackwardHooks], number: int) -> Callable[[Tensor | None], None]:
    """Return a hook of a parameter, called before backward accumulates its gradient.

    By the parameter's number, because a hook that held its parameter would keep it alive.
    """

    @torch.compiler.disable
    def before_gradient(gradient: Tensor | None) -> None:
        hooks = owner()
        if hooks is not None and gradient is not None:
            hooks._on_gradient_comes(number)

    return before_gradient


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
