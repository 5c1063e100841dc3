"""Which gradients are ready, counted while backward produces them, and sent bucket by bucket."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from adasum.optimizer.parameters import Named, PlanBuckets, by_kind, plan_buckets
from collectives.trace import span

__all__ = ["Flight", "GradientReducer", "OptimizerOrderError", "Together"]

_engine = torch.autograd.Variable._execution_engine


class OptimizerOrderError(RuntimeError, AssertionError):
    """backward, zero_grad, synchronize and step were called in an order that would lose gradients.

    Also an AssertionError, which is what Horovod raises in these places.
    """


class Flight(Protocol):
    """What is under way for one bucket."""

    def wait(self) -> None:
        """Blocks until it has arrived; raises what went wrong on the way."""
        ...

    def report(self) -> None:
        """Shows the answer to who watches, who may call collectives: where all ranks are as far."""
        ...


class Together:
    """What is under way for one bucket, in several parts."""

    def __init__(self, parts: Sequence[Flight]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Blocks until all have arrived."""
        for part in self._parts:
            part.wait()

    def report(self) -> None:
        """Shows all answers."""
        for part in self._parts:
            part.report()


Send = Callable[[Sequence[Named], str], Flight | None]

# Who sends a parameter's gradient while backward runs.
_senders: MutableMapping[Tensor, list[weakref.ref[GradientReducer]]] = WeakIdKeyDictionary()


class _Bucket:
    def __init__(self, index: int, members: Sequence[Named]) -> None:
        self.index = index
        self.members = list(members)
        self.name = f"bucket {index}: {members[0][0]} to {members[-1][0]}"
        self.waiting = 0


class GradientReducer:
    """Counts backward passes and sends each bucket once: early, as it completes, or when asked.

    A bucket is complete when each of its trainable parameters has seen `passes` backward passes
    since `restart`. Buckets are sent in one order on every rank: a complete one waits for those
    before it. Hooks may run in any of autograd's threads.

    send: called with a bucket's (name, parameter) pairs and its label. early: send while backward
    runs. final: backward returns only when what it has sent has arrived, so that its caller finds
    gradients that are final. one_rank: nothing is sent at all, only passes are counted.
    """

    def __init__(
        self,
        named: Sequence[Named],
        send: Send,
        *,
        early: bool,
        final: bool = False,
        one_rank: bool = False,
        passes: int = 1,
        buckets: PlanBuckets = plan_buckets,
    ) -> None:
        self.passes = passes
        self.synchronized = False
        self._send = send
        self._early = early and not one_rank
        self._final = final
        self._one_rank = one_rank
        self._lock = threading.RLock()
        self._names: dict[Tensor, str] = {}
        self._counts: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._hooked: set[Tensor] = set()
        self._handles: list[Any] = []
        self._issued = 0
        self._begun = False
        self._in_flight: list[Flight] = []
        self._arrived: list[Flight] = []
        self._awaited = False
        # A hook must not keep a dropped optimizer alive, nor go on counting for it.
        weakref.finalize(self, _remove_all, self._handles)
        self.add(named, buckets)

    @property
    def named(self) -> list[Named]:
        """(name, parameter) of every parameter, in registration order."""
        return [(name, parameter) for parameter, name in self._names.items()]

    @property
    def busy(self) -> bool:
        """Whether anything sent has not been waited for."""
        return bool(self._in_flight)

    def add(self, named: Sequence[Named], buckets: PlanBuckets = plan_buckets) -> None:
        """Takes in parameters (not yet known ones only); their buckets come after those before.

        Gradients that they have already are sent with this step's.
        """
        with self._lock:
            known = len(self._buckets)
            self.synchronized = False
            for name, parameter in named:
                self._names[parameter] = name
                self._counts[parameter] = 0
            for members in buckets(named):
                bucket = _Bucket(len(self._buckets), members)
                self._buckets.append(bucket)
                self._bucket_of.update((parameter, bucket) for _, parameter in members)
            self._hook_trainable()
            self._expect(self._buckets[known:])

    def reached(self, parameter: Tensor) -> bool:
        """Whether backward has produced its gradient since `restart`."""
        return self._counts[parameter] > 0

    def restart(self) -> None:
        """A new step begins: passes count from zero, every bucket waits for all its members."""
        with self._lock:
            self._counts = dict.fromkeys(self._counts, 0)
            self._issued = 0
            self._begun = False
            self._arrived = []
            self.synchronized = False
            self._awaited = False
            self._hook_trainable()

    def synchronize(self, most: int | None = None) -> None:
        """Sends the buckets not sent yet, in their order, and waits for all.

        A second call does nothing. most: at most so many buckets are under way at once.
        """
        if self.synchronized:
            return
        if not self._one_rank:
            try:
                with self._lock:
                    while self._issued < len(self._buckets):
                        self._issue_next()
                        if most is not None and len(self._in_flight) > most:
                            first = self._in_flight.pop(0)
                            first.wait()
                            first.report()
                    if self._early:
                        self._issue_late()
            except BaseException as error:
                self._abandon(error)
                raise
        self.settle()
        # Only now: how much backward itself sends and waits for may differ between the ranks.
        arrived, self._arrived = self._arrived, []
        for flight in arrived:
            flight.report()
        self.synchronized = True

    def settle(self) -> None:
        """Waits for all that was sent; the first error is raised once nothing is under way."""
        with self._lock:
            flights, self._in_flight = self._in_flight, []
        if not flights:
            return
        with span(lambda: f"waiting for {len(flights)} buckets"):
            for i, flight in enumerate(flights):
                try:
                    flight.wait()
                except BaseException as error:
                    self._in_flight = flights[i + 1 :]
                    self._abandon(error)
                    raise
        self._arrived += flights

    def _abandon(self, error: BaseException) -> None:
        """Waits for the rest after an error, without acting on it: memory must not be in use."""
        with self._lock:
            flights, self._in_flight = self._in_flight, []
        for flight in flights:
            drop = getattr(flight, "drop", flight.wait)
            try:
                drop()
            except Exception as other:  # noqa: BLE001 - told along with the first
                _add_note(error, f"after it: {type(other).__name__}: {other}")

    def _hook_trainable(self) -> None:
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                me = weakref.ref(self)
                self._handles.append(parameter.register_post_accumulate_grad_hook(_hook(me)))
                if self._early:
                    _senders[parameter] = [
                        *(other for other in _senders.get(parameter, ()) if other() is not None),
                        me,
                    ]

    def _awaits(self, parameter: Tensor) -> bool:
        return parameter.requires_grad and parameter in self._hooked

    def _expect(self, buckets: Sequence[_Bucket]) -> None:
        for bucket in buckets:
            bucket.waiting = sum(self._awaits(parameter) for _, parameter in bucket.members)

    def _complete(self, bucket: _Bucket) -> bool:
        # Parameters may have become trainable since they were counted.
        return bucket.waiting <= 0 and all(
            self._counts[parameter] >= self.passes
            for _, parameter in bucket.members
            if self._awaits(parameter)
        )

    def _refuse_sharing(self, parameter: Tensor) -> None:
        if all(other() in (None, self) for other in _senders.get(parameter, ())):
            return
        raise OptimizerOrderError(
            f"the gradient of {self._names[parameter]} would be reduced twice, by two optimizers "
            "that DistributedOptimizer returned: give each its own parameters, or drop the first "
            "(del) before the second is made"
        )

    def _on_gradient(self, parameter: Tensor) -> None:
        self._refuse_sharing(parameter)
        with self._lock:
            if not self._begun:
                # Not at `restart`: parameters are frozen and unfrozen between it and backward.
                self._begun = True
                self._expect(self._buckets)
            bucket = self._bucket_of[parameter]
            self._counts[parameter] += 1
            count = self._counts[parameter]
            if count > self.passes:
                raise OptimizerOrderError(
                    f"the gradient of {self._names[parameter]} was computed more than "
                    f"backward_passes_per_step={self.passes} times before step(): raise "
                    "backward_passes_per_step to accumulate gradients, or call step() between (of "
                    "the optimizer that DistributedOptimizer returned)"
                )
            if self.synchronized or bucket.index < self._issued:
                when = "synchronize()" if self.synchronized else f"{bucket.name} was sent"
                raise OptimizerOrderError(
                    f"the gradient of {self._names[parameter]} was computed after {when} "
                    "and before step(): it would be left out of the reduction"
                )
            if not self._early or count < self.passes:
                return
            bucket.waiting -= 1
            while self._issued < len(self._buckets) and self._complete(self._buckets[self._issued]):
                self._issue_next()
                self._await_at_the_end()

    def _await_at_the_end(self) -> None:
        """Once a backward: asks autograd's engine to call at its end, as torch's DDP does."""
        if self._final and not self._awaited:
            self._awaited = True
            _engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        self._awaited = False
        if self._issued == len(self._buckets) and self._hooked.issuperset(
            parameter for parameter in self._names if parameter.requires_grad
        ):
            self.synchronize()
        else:
            self.settle()

    def _issue_next(self) -> None:
        bucket = self._buckets[self._issued]
        self._issued += 1
        members = bucket.members
        if self._early:
            members = [entry for entry in members if entry[1] in self._hooked]
        self._issue(members, bucket.name)

    def _issue_late(self) -> None:
        """Parameters made trainable since `restart`: no hook has told when they were ready."""
        late = [
            (name, parameter)
            for bucket in self._buckets
            for name, parameter in bucket.members
            if parameter.requires_grad and parameter not in self._hooked
        ]
        for members in by_kind(late):
            self._issue(members, f"made trainable since the last step: {members[0][0]}...")

    def _issue(self, members: Sequence[Named], label: str) -> None:
        flight = self._send(members, label) if members else None
        if flight is not None:
            self._in_flight.append(flight)


def _hook(owner: weakref.ref[GradientReducer]) -> Callable[[Tensor], None]:
    def on_gradient(parameter: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer._on_gradient(parameter)

    return on_gradient


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
