"""Adasum's delta method: every rank takes its own step, and the steps are reduced.

Source: Maleki et al., arXiv 2006.02924, the section on optimizers with state: what is reduced is
the difference that an optimizer makes, not the gradient that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, optim

from adasum.modes import outside_modes
from adasum.optimizer.buckets.delta_buffers import DeltaBuffers
from adasum.optimizer.buckets.kinds import same_state, state_of
from adasum.optimizer.buckets.planning import Named, by_kind
from adasum.optimizer.buckets.reduction import Reduction
from adasum.optimizer.consistency.membership import Change
from adasum.optimizer.distributed_mixin import DistributedMixin
from adasum.optimizer.errors import OptimizerOrderError, changed_under_way
from adasum.optimizer.step_hooks import has_pre_hooks
from adasum.real_pairs import as_reals

# While one bucket is reduced the next one steps; more in flight would only hold more memory.
MAX_IN_FLIGHT = 2
# Those of torch's optimizers whose step treats every parameter by itself.
_BY_PARAMETER = (
    *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW),
    *(optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    optim.SparseAdam,
)


def steps_by_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the optimizer treats every parameter by itself, so that buckets step in turn.

    True for torch's own optimizers except LBFGS and Muon, and for subclasses that keep their step.
    """
    return any(unwrap(each.step) is unwrap(kind.step) for each in _BY_PARAMETER)


class DeltaMethod(DistributedMixin):
    """Sets parameters to before + Adasum over the ranks of (after - before).

    The optimizer's state follows each rank's own gradients. Where the optimizer treats every
    parameter by itself, buckets step in turn, and only those in flight are copied; else the whole
    model is. After an error each parameter has its value from before the step or after it.
    """

    _adasum_asked = "op=Adasum and method='delta'"
    _adasum_differences = True
    _adasum_before: dict[Tensor, Tensor] | None = None
    _adasum_buffers: DeltaBuffers

    def _prepare(self) -> None:
        # While backward runs nothing waits for a slot: every bucket may be in flight at once.
        self._adasum_buffers = DeltaBuffers(None if self._adasum_early else MAX_IN_FLIGHT + 1)

    def _follow(self, change: Change) -> None:
        super()._follow(change)
        self._adasum_buffers.clear()

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and the step's differences are reduced.

        It is here so that Horovod's way to clip works: synchronize(), clip, step() within
        skip_synchronize(), which clips this rank's gradients.
        """

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        if self._adasum_settings.one_rank:
            return self._between_hooks(self._local_step, closure, options)
        if self._any_rank_skips():
            return None
        return self._between_hooks(self._step_and_reduce, closure, options)

    def _step_and_reduce(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        self._adasum_buffers.restart()
        if closure is None and not options and steps_by_parameter(self._adasum_base):
            self._adasum_hooks.synchronize(max_in_flight=MAX_IN_FLIGHT)
            return None
        return self._step_as_a_whole(closure, **options)

    def _step_as_a_whole(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        with torch.no_grad():
            before = {p: p.clone() for _, p in self._adasum_hooks.named if may_step(p)}
        with self._reducing_from(before):
            result = self._local_step(closure, **options)
            self._adasum_hooks.synchronize(max_in_flight=MAX_IN_FLIGHT)
            # What a bucket's start has made dense.
            self._resparsify()
            return result

    @contextmanager
    def _reducing_from(self, before: dict[Tensor, Tensor]) -> Iterator[None]:
        """Have buckets reduce what has changed since parameters had these values.

        After an error those that have not been reduced have these values again.
        """
        self._adasum_before = before
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.copy_(value)
            self._adasum_before = None

    @torch.no_grad()
    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        if self._adasum_early and has_pre_hooks(self):
            raise OptimizerOrderError(
                "hooks of register_step_pre_hook cannot be used with step_in_backward=True: the "
                "local steps are taken in backward; pass step_in_backward=False"
            )
        whole = self._adasum_before
        stepping = [(n, p) for n, p in members if (may_step(p) if whole is None else p in whole)]
        started: list[Reduction] = []
        # One kind, unless dtypes or devices have changed since the buckets were planned.
        for i, part in enumerate(by_kind(stepping)):
            started.append(self._start_part(part, f"{bucket}, {i}" if i else bucket))
        return started

    def _start_part(self, members: Sequence[Named], bucket: str) -> Reduction:
        """Take the local step of parameters of one kind, and start reducing its difference."""
        whole = self._adasum_before
        names, parameters = zip(*members, strict=True)
        values = [as_reals(parameter.detach()) for parameter in parameters]
        # Here, because the buffers would refuse a dtype without naming the operator.
        self._adasum_settings.reducer.op.check(values[0].dtype)
        saved, fused = self._adasum_buffers.of(bucket, parameters)
        before, deltas = saved.views, fused.views
        if whole is None:
            torch._foreach_copy_(before, values)
        else:
            before = [as_reals(whole.pop(parameter).detach()) for parameter in parameters]
        try:
            if whole is None:
                with self._only(parameters):
                    self._local_step()
            torch._foreach_copy_(deltas, values)
            torch._foreach_sub_(deltas, before)
        finally:
            torch._foreach_copy_(values, before)
        with outside_modes():
            reduction = self._adasum_settings.reducer.reduce_async(names, fused, bucket)
        taken = [state_of(parameter.grad) for parameter in parameters if self._adasum_early]

        def install(result: Any) -> None:
            for name, parameter, state in zip(names, parameters, taken, strict=False):
                if not same_state(state, state_of(parameter.grad)):
                    raise changed_under_way(name)
            reduction.install(result)
            # By step_in_backward they may have been given other memory since.
            now = [as_reals(parameter.detach()) for parameter in parameters]
            for name, value, delta in zip(names, now, deltas, strict=True):
                if value.shape != delta.shape or value.dtype is not delta.dtype:
                    raise ValueError(
                        f"{name} has another shape or dtype than when its local step was taken, "
                        "in backward: change it between step() and backward(), or pass "
                        "step_in_backward=False"
                    )
            torch._foreach_add_(now, deltas)

        return replace(reduction, install=install)

    @contextmanager
    def _only(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Hide all other parameters from the optimizer."""
        wanted, whole = set(parameters), self.param_groups
        parts = [{**each, "params": [p for p in each["params"] if p in wanted]} for each in whole]
        self.param_groups = [part for part in parts if part["params"]]
        try:
            yield
        finally:
            self.param_groups = whole


class DeltaMethodInBackward(DeltaMethod):
    """The delta method with each bucket's local step taken as soon as backward has its gradients.

    So reductions overlap with backward, for the memory of a copy of each parameter in flight.
    Nothing can be done to the gradients between backward and step().
    """

    _adasum_early = True

    def synchronize(self) -> None:
        """Raise OptimizerOrderError: clipping would come too late."""
        raise OptimizerOrderError(
            "synchronize() makes no sense with step_in_backward=True: the local steps are taken "
            "while backward runs, before gradients could be clipped"
        )

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        if "found_inf" in self.__dict__:
            raise OptimizerOrderError(
                "GradScaler cannot be used with step_in_backward=True: the local steps were taken "
                "with scaled gradients"
            )
        if options:
            raise OptimizerOrderError(
                f"step({', '.join(options)}=...) comes too late with step_in_backward=True: the "
                "local steps were taken in backward; pass step_in_backward=False"
            )
        if self._adasum_settings.one_rank:
            return self._between_hooks(self._local_step, closure, options)
        return self._between_hooks(self._finish_steps, closure, options)

    def _wants(self, parameter: Tensor) -> bool:
        return may_step(parameter)

    def _finish_steps(self, closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            result = None if closure is None else closure()
        self._adasum_hooks.synchronize()
        return result


def may_step(parameter: Tensor) -> bool:
    """Return whether the optimizer may step the parameter.

    It does by any gradient, one left over from before the parameter was frozen included.
    """
    return parameter.requires_grad or parameter.grad is not None
