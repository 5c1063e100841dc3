"""Adasum's delta method: every rank takes its own step, and the steps are reduced.

Source: Maleki et al., arXiv 2006.02924, the section on optimizers with state: what is reduced is
the difference that an optimizer makes, not the gradient that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adasum.optimizer.backward_hooks import OptimizerOrderError
from adasum.optimizer.bucket_buffers import DeltaBuffers, fits_in_buffer
from adasum.optimizer.bucket_reduction import Reduction
from adasum.optimizer.distributed_mixin import (
    DistributedMixin,
    clears_scaler_state_on_error,
    densify,
)
from adasum.optimizer.parameters import Named
from collectives import FusedBuffer, Sum

# One bucket's reduction hides the next one's step; more would only hold more memory.
_MAX_IN_FLIGHT = 2
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
    return any(unwrap(known.step) is unwrap(kind.step) for known in _BY_PARAMETER)


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook expects to see the step as a whole."""
    # Not public, but torch lists its hooks nowhere else.
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


class _DeltaReduction:
    """A bucket's differences in flight, while its parameters hold the values from before."""

    def __init__(
        self, reduction: Reduction, parameters: list[Tensor], deltas: list[Tensor]
    ) -> None:
        self._reduction = reduction
        self._parameters = parameters
        self._deltas = deltas

    def wait(self) -> None:
        """Add the reduced differences to the parameters, once they are there."""
        self._reduction.wait()
        with torch.no_grad():
            torch._foreach_add_(self._parameters, self._deltas)

    def notify_observer(self) -> None:
        """Show the reduced differences, which their buffer still holds."""
        self._reduction.notify_observer()

    def discard(self) -> None:
        """Wait, and leave the parameters at their values from before."""
        self._reduction.discard()


class DeltaMethod(DistributedMixin):
    """Sets parameters to before + Adasum over the ranks of (after - before).

    The optimizer's state follows each rank's own gradients. Where the optimizer treats every
    parameter by itself, buckets step in turn, and only those in flight are copied; else the whole
    model is. After an error each parameter has its value from before the step or after it.
    """

    _adasum_before: dict[Tensor, Tensor] | None = None
    _adasum_buffers: DeltaBuffers

    def _prepare(self) -> None:
        self._adasum_buffers = DeltaBuffers(_MAX_IN_FLIGHT + 1)

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and the step's differences are reduced.

        It is here so that Horovod's way to clip works: synchronize(), clip, step() within
        skip_synchronize(), which clips this rank's gradients.
        """

    @clears_scaler_state_on_error
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the local step (a closure sees this rank's data), and add the reduced difference."""
        hooks = self._adasum_hooks
        if closure is None:
            self._densify()
        elif self._adasum_sparse_as_dense:
            closure = self._densifying(closure)
        result = None
        if self._adasum_one_rank:
            result = self._local_step(closure)
        elif not self._any_rank_skips():
            separable = steps_by_parameter(self._adasum_base) and not _has_step_hooks(self)
            if closure is None and separable:
                hooks.synchronize(max_in_flight=_MAX_IN_FLIGHT)
            else:
                result = self._step_as_a_whole(closure)
        hooks.restart()
        self._adasum_buffers.restart()
        return result

    def _densifying(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure with its gradients made dense."""

        def evaluate() -> Any:
            loss = closure()
            self._densify()
            return loss

        return evaluate

    def _step_as_a_whole(self, closure: Callable[[], Any] | None) -> Any:
        with torch.no_grad():
            self._adasum_before = {
                parameter: parameter.clone()
                for _, parameter in self._adasum_hooks.named
                if _steps(parameter)
            }
        try:
            result = self._local_step(closure)
            self._adasum_hooks.synchronize(max_in_flight=_MAX_IN_FLIGHT)
            return result
        finally:
            with torch.no_grad():
                for parameter, before in self._adasum_before.items():
                    parameter.copy_(before)
            self._adasum_before = None

    def _any_rank_skips(self) -> bool:
        """Return whether, under GradScaler, any rank's gradients hold a non-finite value."""
        found = self.__dict__.get("found_inf")
        if found is None or self._adasum_group is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self._adasum_group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    @torch.no_grad()
    def _start_bucket(self, members: Sequence[Named], bucket: str) -> Reduction | None:
        whole = self._adasum_before
        stepping = [
            (name, parameter)
            for name, parameter in members
            if (_steps(parameter) if whole is None else parameter in whole)
        ]
        if not stepping:
            return None
        names, parameters = zip(*stepping, strict=True)
        values = [parameter.detach() for parameter in parameters]
        sent: FusedBuffer | list[Tensor]
        if fits_in_buffer(values[0]):
            saved, fused = self._adasum_buffers.of(bucket, parameters)
            before, deltas, sent = saved.views, fused.views, fused
        else:
            before, deltas = ([torch.empty_like(value) for value in values] for _ in range(2))
            sent = deltas
        if whole is None:
            torch._foreach_copy_(before, values)
            with self._only(parameters):
                self._local_step()
        else:
            before = [whole.pop(parameter) for parameter in parameters]
        torch._foreach_copy_(deltas, values)
        torch._foreach_sub_(deltas, before)
        torch._foreach_copy_(values, before)
        reduction = self._adasum_reducer.reduce_async(names, sent, bucket)
        return _DeltaReduction(reduction, values, deltas)

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

    def _prepare(self) -> None:
        self._adasum_buffers = DeltaBuffers(None)

    def synchronize(self) -> None:
        """Raise OptimizerOrderError: clipping would come too late."""
        raise OptimizerOrderError(
            "synchronize() makes no sense with step_in_backward=True: the local steps are taken "
            "while backward runs, before gradients could be clipped"
        )

    @clears_scaler_state_on_error
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the steps that backward left over, and add all reduced differences."""
        if "found_inf" in self.__dict__:
            raise OptimizerOrderError(
                "GradScaler cannot be used with step_in_backward=True: the local steps were taken "
                "with scaled gradients"
            )
        if self._adasum_one_rank:
            return super().step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._adasum_hooks.synchronize()
        self._adasum_hooks.restart()
        self._adasum_buffers.restart()
        return result

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> Reduction | None:
        if _has_step_hooks(self):
            raise OptimizerOrderError(
                "step hooks cannot be used with step_in_backward=True: each bucket has a step of "
                "its own, and they would run for every one; pass step_in_backward=False"
            )
        if self._adasum_sparse_as_dense:
            for _, parameter in members:
                densify(parameter)
        return super()._start_bucket(members, bucket)


def _steps(parameter: Tensor) -> bool:
    """Return whether the optimizer may step the parameter.

    It does by any gradient, one left over from before the parameter was frozen included.
    """
    return parameter.requires_grad or parameter.grad is not None


# torch wraps the step of any optimizer class not so marked, and would run step hooks twice.
vars(DeltaMethod)["step"].hooked = True
vars(DeltaMethodInBackward)["step"].hooked = True
