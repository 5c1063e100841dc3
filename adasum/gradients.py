"""Gradients reduced in buckets while backward produces them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.compression import Compressor
from adasum.parameters import Groups, Named, plan_buckets
from collectives import Group, Reducer, Work

__all__ = ["GradientReducer", "InFlight", "OptimizerOrderError", "Wire"]


class OptimizerOrderError(RuntimeError, AssertionError):
    """backward, zero_grad, synchronize and step were called in an order that would lose gradients.

    Also an AssertionError, which is what Horovod raises in these places.
    """


class Wire:
    """How tensors travel: the group, the operation, the scales and the compression."""

    def __init__(
        self,
        group: Group,
        op: Reducer,
        compression: type[Compressor],
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self.group = group
        self.op = op
        self.compression = compression
        self.prescale = prescale
        self.postscale = postscale

    def reduce_async(self, tensors: Sequence[Tensor], name: str) -> InFlight:
        """Starts reducing the tensors in place, all in one group; strided ones travel as copies."""
        return InFlight(self, tensors, name)


class InFlight:
    """A reduction under way; the tensors hold the answer after `wait`."""

    def __init__(self, wire: Wire, tensors: Sequence[Tensor], name: str) -> None:
        self._compression = wire.compression
        self._tensors = [tensor.detach() for tensor in tensors]
        self._sent: list[tuple[Tensor, Any]] = []
        for tensor in self._tensors:
            short, ctx = wire.compression.compress(tensor)
            self._sent.append((short.contiguous(), ctx))
        self._work: Work | Any = wire.group.grouped_all_reduce(
            [short for short, _ in self._sent],
            wire.op,
            name=name,
            prescale=wire.prescale,
            postscale=wire.postscale,
            async_op=True,
        )

    def wait(self) -> None:
        """Blocks until the answer is in the tensors; raises what went wrong on the way."""
        self._work.wait()
        for tensor, (short, ctx) in zip(self._tensors, self._sent, strict=True):
            if short is not tensor:
                tensor.copy_(self._compression.decompress(short, ctx))


class _Bucket:
    def __init__(self, index: int, members: Sequence[Named]) -> None:
        self.members = list(members)
        self.name = f"bucket {index}: {members[0][0]} to {members[-1][0]}"
        self.waiting = 0


class GradientReducer:
    """Counts backward passes and, where `wire` is given, reduces each bucket as it completes.

    A bucket is complete when each of its parameters has seen `passes` backward passes since
    `restart`. Buckets are issued in one order on every rank: a complete one waits for those before
    it. Hooks may run in any of autograd's threads.

    wire: None where nothing travels (one rank; or Adasum's delta method, which reduces after the
    step): then only the number of passes is checked, and gradients are never touched.
    """

    def __init__(
        self,
        named: Sequence[Named],
        *,
        wire: Wire | None,
        passes: int = 1,
        groups: Groups = None,
        sparse_as_dense: bool = False,
    ) -> None:
        self.passes = passes
        self._wire = wire
        self._sparse_as_dense = sparse_as_dense
        self._lock = threading.RLock()
        self._names: dict[Tensor, str] = {}
        self._counts: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._hooked: set[Tensor] = set()
        self._handles: list[Any] = []
        self._issued = 0
        self._in_flight: list[InFlight] = []
        self.synchronized = False
        # A hook must not keep a dropped optimizer alive, nor go on counting for it.
        weakref.finalize(self, _remove_all, self._handles)
        self.add(named, groups)

    @property
    def buckets(self) -> list[list[Named]]:
        """The buckets in the order in which they are issued."""
        return [bucket.members for bucket in self._buckets]

    @property
    def busy(self) -> bool:
        """True from the first bucket issued until `synchronize`."""
        return bool(self._in_flight)

    def add(self, named: Sequence[Named], groups: Groups = None) -> None:
        """Takes in parameters (not yet known ones only); their buckets come after those before."""
        with self._lock:
            for name, parameter in named:
                self._names[parameter] = name
                self._counts[parameter] = 0
            for members in plan_buckets(named, groups):
                bucket = _Bucket(len(self._buckets), members)
                self._buckets.append(bucket)
                self._bucket_of.update((parameter, bucket) for _, parameter in members)
            self._hook_trainable()
            self._expect()

    def restart(self) -> None:
        """A new step begins: passes count from zero, every bucket waits for all its members."""
        with self._lock:
            self._counts = dict.fromkeys(self._counts, 0)
            self._issued = 0
            self.synchronized = False
            self._hook_trainable()
            self._expect()

    def synchronize(self) -> None:
        """Issues the buckets not issued yet, in their order, and waits for all.

        A trainable parameter without a gradient contributes zeros and gets the reduced one, so that
        ranks on which backward took another way still agree. A second call does nothing.
        """
        if self.synchronized:
            return
        with self._lock:
            if self._wire is not None:
                while self._issued < len(self._buckets):
                    self._issue_next()
                self._issue_late()
            flights, self._in_flight = self._in_flight, []
            self.synchronized = True
        for flight in flights:
            flight.wait()

    def densify(self) -> None:
        """With sparse_as_dense: turns sparse gradients into dense ones."""
        if self._sparse_as_dense:
            for parameter in self._names:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()

    def _hook_trainable(self) -> None:
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))
                )

    def _expect(self) -> None:
        for bucket in self._buckets:
            bucket.waiting = sum(parameter.requires_grad for _, parameter in bucket.members)

    def _on_gradient(self, parameter: Tensor) -> None:
        with self._lock:
            self._counts[parameter] += 1
            count = self._counts[parameter]
            if count > self.passes:
                raise OptimizerOrderError(
                    f"the gradient of {self._names[parameter]} was computed more than "
                    f"backward_passes_per_step={self.passes} times before step(): raise "
                    "backward_passes_per_step to accumulate gradients, or call step() between"
                )
            if self.synchronized:
                raise OptimizerOrderError(
                    f"the gradient of {self._names[parameter]} was computed after synchronize() "
                    "and before step(): it would be left out of the reduction"
                )
            if self._wire is None or count < self.passes:
                return
            self._bucket_of[parameter].waiting -= 1
            while self._issued < len(self._buckets) and self._buckets[self._issued].waiting == 0:
                self._issue_next()

    def _issue_next(self) -> None:
        bucket = self._buckets[self._issued]
        self._issued += 1
        self._send(
            [
                entry
                for entry in bucket.members
                if entry[1].requires_grad and entry[1] in self._hooked
            ],
            bucket.name,
        )

    def _issue_late(self) -> None:
        """Parameters made trainable since `restart`: no hook has told when they were ready."""
        members = [entry for bucket in self._buckets for entry in bucket.members]
        late = [(n, p) for n, p in members if p.requires_grad and p not in self._hooked]
        self._send(late, "parameters made trainable since the last step")

    def _send(self, members: Sequence[Named], name: str) -> None:
        if members and self._wire is not None:
            gradients = [self._gradient(each, parameter) for each, parameter in members]
            self._in_flight.append(self._wire.reduce_async(gradients, name))

    def _gradient(self, name: str, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            if not self._sparse_as_dense:
                raise NotImplementedError(
                    f"the gradient of {name} is sparse: reducing it as such is not supported yet; "
                    "pass sparse_as_dense=True"
                )
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad


def _hook(owner: weakref.ref[GradientReducer]) -> Callable[[Tensor], None]:
    def on_gradient(parameter: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer._on_gradient(parameter)

    return on_gradient


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
