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
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adasum.optimizer.backward_hooks import OptimizerOrderError
from adasum.optimizer.bucket_buffers import DeltaBuffers
from adasum.optimizer.bucket_reduction import Reduction
from adasum.optimizer.distributed_mixin import DistributedMixin
from adasum.optimizer.parameters import Named

# One bucket's reduction hides the next one's step; more would only hold more memory.
MAX_IN_FLIGHT = 2
# Those of torch's optimizers whose step treats every parameter by itself.
_BY_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def steps_by_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the optimizer treats every parameter by itself, so that buckets step in turn.

    True for torch's own optimizers except LBFGS and Muon, and for subclasses that keep their step.
    """
    return any(unwrap(each.step) is unwrap(kind.step) for each in _BY_PARAMETER)


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook expects to see the step as a whole."""
    # Not public, but torch lists its hooks nowhere else.
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


class DeltaMethod(DistributedMixin):
    """Sets parameters to before + Adasum over the ranks of (after - before).

    The optimizer's state follows each rank's own gradients. Where the optimizer treats every
    parameter by itself, buckets step in turn, and only those in flight are copied; else the whole
    model is. After an error each parameter has its value from before the step or after it.
    """

    _adasum_before: dict[Tensor, Tensor] | None = None
    _adasum_buffers: DeltaBuffers

    def _prepare(self) -> None:
        # While backward runs nothing waits for a slot: every bucket may be in flight at once.
        self._adasum_buffers = DeltaBuffers(None if self._adasum_early else MAX_IN_FLIGHT + 1)

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and the step's differences are reduced.

        It is here so that Horovod's way to clip works: synchronize(), clip, step() within
        skip_synchronize(), which clips this rank's gradients.
        """

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        if self._adasum_settings.one_rank:
            return self._local_step(closure)
        if self._any_rank_skips():
            return None
        self._adasum_buffers.restart()
        if closure is None and steps_by_parameter(self._adasum_base) and not _has_step_hooks(self):
            self._adasum_hooks.synchronize(max_in_flight=MAX_IN_FLIGHT)
            return None
        return self._step_as_a_whole(closure)

    def _step_as_a_whole(self, closure: Callable[[], Any] | None) -> Any:
        with torch.no_grad():
            self._adasum_before = {
                parameter: parameter.clone()
                for _, parameter in self._adasum_hooks.named
                if may_step(parameter)
            }
        try:
            result = self._local_step(closure)
            self._adasum_hooks.synchronize(max_in_flight=MAX_IN_FLIGHT)
            # What a bucket's start has made dense.
            self._resparsify()
            return result
        finally:
            with torch.no_grad():
                for parameter, before in self._adasum_before.items():
                    parameter.copy_(before)
            self._adasum_before = None

    @torch.no_grad()
    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        whole = self._adasum_before
        stepping = [
            (name, parameter)
            for name, parameter in members
            if (may_step(parameter) if whole is None else parameter in whole)
        ]
        if not stepping:
            return []
        names, parameters = zip(*stepping, strict=True)
        values = [parameter.detach() for parameter in parameters]
        # Before the buffers, which know nothing of other dtypes.
        self._adasum_settings.reducer.op.check(values[0].dtype)
        saved, fused = self._adasum_buffers.of(bucket, parameters)
        before, deltas = saved.views, fused.views
        if whole is None:
            torch._foreach_copy_(before, values)
        else:
            before = [whole.pop(parameter) for parameter in parameters]
        try:
            if whole is None:
                with self._only(parameters):
                    self._local_step()
            torch._foreach_copy_(deltas, values)
            torch._foreach_sub_(deltas, before)
        finally:
            torch._foreach_copy_(values, before)
        reduction = self._adasum_settings.reducer.reduce_async(names, fused, bucket)

        def install(result: Any) -> None:
            reduction.install(result)
            torch._foreach_add_(values, deltas)

        return [replace(reduction, install=install)]

    @contextmanager
    def _only(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Hide all other parameters from the optimizer."""
        wanted = set(parameters)
        whole = self.param_groups
        parts = [
            {**group, "params": [each for each in group["params"] if each in wanted]}
            for group in whole
        ]
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

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        if "found_inf" in self.__dict__:
            raise OptimizerOrderError(
                "GradScaler cannot be used with step_in_backward=True: the local steps were taken "
                "with scaled gradients"
            )
        if self._adasum_settings.one_rank:
            return self._local_step(closure)
        with torch.enable_grad():
            result = None if closure is None else closure()
        self._adasum_hooks.synchronize()
        return result

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        if _has_step_hooks(self):
            raise OptimizerOrderError(
                "step hooks cannot be used with step_in_backward=True: each bucket has a step of "
                "its own, and they would run for every one; pass step_in_backward=False"
            )
        return super()._start_bucket(members, bucket)


def may_step(parameter: Tensor) -> bool:
    """Return whether the optimizer may step the parameter.

    It does by any gradient, one left over from before the parameter was frozen included.
    """
    return parameter.requires_grad or parameter.grad is not None
