"""Adasum's delta method: every rank takes its own step, and the steps are reduced.

Source: Maleki et al., arXiv 2006.02924, the section on optimizers with state: ranks reduce the
change that their optimizer makes to the parameters, not the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, optim

from adasum.optimizer.bucket import (
    Bucket,
    Member,
    Part,
    in_memory_order,
    memory_order,
    refuse_changed,
    versions_of,
)
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.local_step import has_pre_hooks, resparsify
from adasum.optimizer.method import Method
from adasum.optimizer.planning import Named, by_kind
from adasum.optimizer.record import Record
from adasum.optimizer.reduction import Reduction
from collectives.modes import outside_modes

# While one bucket is reduced the next one steps; more in flight would only hold more memory.
MAX_IN_FLIGHT = 2
# torch's optimizers that step each parameter independently of the others.
_BY_PARAMETER = (
    *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW),
    *(optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    optim.SparseAdam,
)


def steps_by_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the optimizer steps each parameter by itself, so that buckets step in turn.

    True for torch's own optimizers except LBFGS and Muon, and for subclasses that keep their step.
    """
    return any(unwrap(each.step) is unwrap(kind.step) for each in _BY_PARAMETER)


class DeltaMethod(Method):
    """Sets parameters to before + Adasum over the ranks of (after - before).

    The optimizer's state follows each rank's own gradients. If the optimizer steps each parameter
    by itself, buckets step in turn, and only buckets in flight are copied; otherwise the whole
    model is. After an error each parameter has its value from before the step or after it.
    """

    asked = "op=Adasum and method='delta'"
    differences = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Values before the step, while the whole model steps at once.
        self._before: dict[Tensor, Tensor] | None = None
        # Memory that the buckets use in turn.
        self._memory: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._turn = 0

    def follow(self, new: Sequence[Named], gone: Sequence[Tensor]) -> None:
        """Reduce other parameters from now on, and drop memory of the former size."""
        super().follow(new, gone)
        self._memory.clear()

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and the step's differences are reduced.

        It exists so that Horovod's way to clip works: synchronize(), clip, then step() within
        skip_synchronize(). This clips this rank's gradients.
        """

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Step locally, and reduce the changes of the parameters."""
        if self.settings.one_rank:
            return self.between_hooks(self.local_step, closure, options)
        if self.any_rank_skips():
            return None
        return self.between_hooks(self._step_and_reduce, closure, options)

    def _step_and_reduce(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        self._turn = 0
        if closure is None and not options and steps_by_parameter(self.base):
            self.backward.synchronize(max_in_flight=MAX_IN_FLIGHT)
            return None
        return self._step_as_a_whole(closure, **options)

    def _step_as_a_whole(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        with torch.no_grad():
            before = {p: p.clone() for p in self.backward.records if may_step(p)}
        self._before = before
        try:
            result = self.local_step(closure, **options)
            self.backward.synchronize(max_in_flight=MAX_IN_FLIGHT)
        finally:
            # After an error, restore the parameters that have not been reduced.
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)
            self._before = None
        if self.settings.sparse_as_dense:
            # The start of each bucket has made sparse gradients dense.
            resparsify(self.optimizer)
        return result

    def is_left(self, parameter: Tensor, record: Record) -> bool:
        """Return False: a second step with the same gradient is reduced, too."""
        return False

    def start(self, bucket: Bucket, members: list[Member]) -> list[Reduction]:
        """Take the local step of a bucket's parameters, and start reducing their differences."""
        if self.early and has_pre_hooks(self.optimizer):
            raise OptimizerOrderError(
                "hooks of register_step_pre_hook cannot be used with step_in_backward=True: the "
                "local steps are taken in backward; pass step_in_backward=False"
            )
        self.densify()
        whole = self._before
        stepping = [
            (record, p) for record, p in members if (may_step(p) if whole is None else p in whole)
        ]
        started = []
        # There is one kind, unless dtypes or devices have changed since the planning.
        for number, each in enumerate(by_kind(stepping)):
            started.append(self._start_kind(bucket, number, each))
        return started

    def _start_kind(self, bucket: Bucket, number: int, members: list[Member]) -> Reduction:
        reducer, name = self.settings.reducer, bucket.part_name(number)
        orders = [memory_order(parameter) for _, parameter in members]

        def values() -> list[Tensor]:
            each = zip(members, orders, strict=True)
            return [in_memory_order(p.detach(), order) for (_, p), order in each]

        now = values()
        reducer.op.check(now[0].dtype)
        part = self._part(bucket, number, members, now) if reducer.casts else None
        if self._before is None:
            before = self._saved(part, now)
        else:
            whole = [self._before.pop(parameter) for _, parameter in members]
            before = [in_memory_order(b, o) for b, o in zip(whole, orders, strict=True)]
        try:
            if self._before is None:
                with self._only([parameter for _, parameter in members]):
                    self.local_step()
            deltas = self._differences(part, now, before)
        finally:
            torch._foreach_copy_(now, before)
        # The step has used the gradients: in backward nothing may change them any more.
        gradients = [p.grad for _, p in members] if self.early else []
        versions = versions_of(gradients)

        def install(_: Any) -> None:
            refuse_changed(members[: len(gradients)], gradients, versions)
            if part is not None and part.tensors is not part.slots:
                part.unpack(1.0)
            # With step_in_backward, parameters may have been given other memory since.
            torch._foreach_add_(values(), deltas)

        with outside_modes():
            if part is not None:
                return reducer.start(part, install)
            names = [record.name for record, _ in members]
            return reducer.start_compressed(names, deltas, name, install)

    def _saved(self, part: Part | None, now: list[Tensor]) -> list[Tensor]:
        """Return copies of the values; with a part, in memory that the next bucket overwrites."""
        if part is None or part.flat.dtype is not now[0].dtype:
            return [value.clone() for value in now]
        saved = part.layout.views(
            self._allocate(-1, part.flat.numel(), now[0].dtype, now[0].device)
        )
        torch._foreach_copy_(saved, now)
        return saved

    def _differences(
        self, part: Part | None, now: list[Tensor], before: list[Tensor]
    ) -> list[Tensor]:
        """Return now - before, packed if there is a part: in its memory, if dtypes are equal."""
        if part is not None and part.flat.dtype is now[0].dtype:
            part.pack([each.contiguous() for each in now], 1.0)
            torch._foreach_sub_(part.slots, before)
            part.tensors = part.slots
            return part.slots
        deltas = [each.clone(memory_format=torch.contiguous_format) for each in now]
        torch._foreach_sub_(deltas, before)
        if part is not None:
            part.pack(deltas, 1.0)
        return deltas

    def _part(
        self, bucket: Bucket, number: int, members: list[Member], values: list[Tensor]
    ) -> Part:
        """Return memory for differences: in backward each bucket's own, otherwise used in turn."""
        slot = self._turn % (MAX_IN_FLIGHT + 1)
        self._turn += 1
        part, name = bucket.parts.get(number), bucket.part_name(number)
        if part is not None and part.fits(name, members, values):
            memory = self._memory.get((slot, part.flat.dtype, part.flat.device))
            if self.early or (memory is not None and memory.data_ptr() == part.flat.data_ptr()):
                return part
        bucket.parts[number] = Part(
            *(name, members, [each.contiguous() for each in values]),
            self.settings.reducer.compression,
            allocate=bucket.allocate if self.early else partial(self._allocate, slot),
        )
        return bucket.parts[number]

    def _allocate(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = self._memory.get((slot, dtype, device))
        if memory is None or memory.numel() < numel:
            memory = torch.empty(numel, dtype=dtype, device=device)
            self._memory[slot, dtype, device] = memory
        return memory[:numel]

    @contextmanager
    def _only(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Hide all other parameters from the optimizer."""
        optimizer, wanted = self.optimizer, set(parameters)
        whole = optimizer.param_groups
        parts = [{**each, "params": [p for p in each["params"] if p in wanted]} for each in whole]
        optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = whole


class DeltaMethodInBackward(DeltaMethod):
    """The delta method that takes each bucket's local step once backward has its gradients.

    Reductions overlap with backward, which takes memory for a copy of each parameter in flight. The
    gradients cannot be changed between backward and step().
    """

    early = True
    placed = True

    def synchronize(self) -> None:
        """Raise OptimizerOrderError: clipping would come too late."""
        raise OptimizerOrderError(
            "synchronize() makes no sense with step_in_backward=True: the local steps are taken "
            "while backward runs, before gradients could be clipped"
        )

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Wait for the differences."""
        if "found_inf" in self.optimizer.__dict__:
            raise OptimizerOrderError(
                "GradScaler cannot be used with step_in_backward=True: the local steps were taken "
                "with scaled gradients"
            )
        if options:
            raise OptimizerOrderError(
                f"step({', '.join(options)}=...) comes too late with step_in_backward=True: the "
                "local steps were taken in backward; pass step_in_backward=False"
            )
        if self.settings.one_rank:
            return self.between_hooks(self.local_step, closure, options)
        return self.between_hooks(self._finish_steps, closure, options)

    def _finish_steps(self, closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            result = None if closure is None else closure()
        self.backward.synchronize()
        return result


def may_step(parameter: Tensor) -> bool:
    """Return whether the optimizer may step the parameter.

    It also steps a frozen parameter that still has a gradient.
    """
    return parameter.requires_grad or parameter.grad is not None
