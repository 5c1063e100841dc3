"""The wrapped optimizer's own step, within a distributed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adasum.horovod.process_sets import ProcessSet
from adasum.modes import outside_modes
from adasum.optimizer.backward_hooks import BackwardHooks
from adasum.optimizer.buckets.planning import PlanBuckets
from adasum.optimizer.buckets.reduction import BucketReducer
from adasum.optimizer.errors import explain_shapes
from adasum.optimizer.step_hooks import run_post_hooks, run_pre_hooks, without_hooks
from collectives import Group, Reducer, Sum

# What GradScaler sets on an optimizer for the time of a step.
SCALER_STATE = ("grad_scale", "found_inf")


@dataclass
class Settings:
    """What DistributedOptimizer was asked for, by its arguments' names, and what follows from it.

    `passes` are backward passes of a step; `one_rank` says that this rank reduces with no other;
    `op` is as asked for, the reducer's is Sum where Average is divided before and after it.
    """

    reducer: BucketReducer
    plan_buckets: PlanBuckets
    passes: int
    sparse_as_dense: bool
    one_rank: bool
    op: Reducer
    process_set: ProcessSet
    local_steps: int = 1
    gradient_as_bucket_view: bool = True


class WrappedStep(torch.optim.Optimizer):
    """How the wrapped optimizer steps: under GradScaler, between hooks, by sparse gradients."""

    # Makes GradScaler call step() always and on every rank, and leave unscaling and skipping to it,
    # so that the ranks can skip together.
    _step_supports_amp_scaling = True
    # Whether the wrapped optimizer's own step unscales gradients.
    _adasum_unscales_itself: bool
    _adasum_base: type[torch.optim.Optimizer]
    _adasum_hooks: BackwardHooks
    _adasum_settings: Settings

    @property
    def _adasum_group(self) -> Group:
        return self._adasum_settings.reducer.group

    def _adasum_parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of their numbers in a state_dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _between_hooks(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        """Return `step(closure, **options)`, run between the step hooks; None where it is skipped.

        GradScaler leaves unscaling and skipping to this (`_step_supports_amp_scaling`).
        """
        if self._skips():
            return None
        self._unscale()
        args: tuple[Any, ...] = () if closure is None else (closure,)
        args, options = run_pre_hooks(self, args, options)
        options = {**options}
        closure = args[0] if args else options.pop("closure", None)
        result = step(closure, **options)
        run_post_hooks(self, args, options)
        return result

    def _skips(self) -> bool:
        """Return whether GradScaler wants the step skipped, for this rank's gradients."""
        return not self._adasum_unscales_itself and bool(self.__dict__.get("found_inf", False))

    @outside_modes()
    def _any_rank_skips(self) -> bool:
        """Return whether any rank's gradients hold a non-finite value; collective by GradScaler."""
        found = self.__dict__.get("found_inf")
        if found is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self._adasum_group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    def _unscale(self) -> None:
        """Divide the gradients by GradScaler's scale, unless the wrapped optimizer's step does."""
        scale = self.__dict__.get("grad_scale")
        if scale is None or self._adasum_unscales_itself:
            return
        # By float64, as GradScaler does it: a subnormal's reciprocal is infinite in float32.
        inverse = scale.double().reciprocal().float()
        for parameter in self._adasum_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))

    def _resparsify(self) -> None:
        """Make gradients that were made dense sparse by rows again for SparseAdam, as Horovod does.

        It refuses dense ones, and leaves what belongs to rows without a gradient alone.
        """
        if not (self._adasum_settings.sparse_as_dense and isinstance(self, torch.optim.SparseAdam)):
            return
        for parameter in self._adasum_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)

    def _evaluate_and_resparsify(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._resparsify()
        return loss

    def _local_step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Take the wrapped optimizer's step, without step hooks."""
        args: tuple[Any, ...] = ()
        if closure is None:
            self._resparsify()
        else:
            args = (partial(self._evaluate_and_resparsify, closure),)
        # Some optimizers refuse a step while these are set; GradScaler deletes them afterwards.
        keys = () if self._adasum_unscales_itself else SCALER_STATE
        held = {key: self.__dict__.pop(key) for key in keys if key in self.__dict__}
        try:
            with without_hooks(self, self._adasum_base.step) as step:
                return step(self, *args, **options)
        except RuntimeError as error:
            explain_shapes(self._adasum_hooks.names, self.state, error)
            raise
        finally:
            self.__dict__.update(held)
