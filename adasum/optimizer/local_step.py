"""The wrapped optimizer's own step within a distributed one: hooks, GradScaler, sparse gradients.

Step hooks must see the final parameters. The wrapped optimizer's step would run them before its
result is reduced or broadcast, and once for every bucket.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from adasum.optimizer.errors import OptimizerOrderError

# Attributes that GradScaler sets on an optimizer while it steps.
SCALER_STATE = ("grad_scale", "found_inf")
_REFUSE = "refuse_plain_steps"
# torch lists an optimizer's hooks only in these attributes, which are not public.
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# torch wraps the step of every optimizer class in this function, to run the hooks.
with_hooks: Any = torch.optim.Optimizer.profile_hook_step
# The wrapper's code, to tell steps that torch has wrapped from other decorated ones.
_WRAPPER = with_hooks(lambda: None).__code__


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_plain_steps(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Register a hook that refuses the plain optimizer's step while its wrapper is alive."""
    reference = weakref.ref(wrapper)

    def refuse(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if reference() not in (None, stepping):
            raise OptimizerOrderError(
                "step() was called on the optimizer that was passed to DistributedOptimizer, which "
                "reduces nothing: call step() on the optimizer that DistributedOptimizer returned, "
                "and pass that one to learning-rate schedulers, too"
            )

    refuse.__name__ = _REFUSE
    optimizer.register_step_pre_hook(refuse)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the user has registered a hook to run before the step."""
    names = {getattr(hook, "__name__", "") for hook in getattr(optimizer, _PRE).values()}
    return bool(_global_optimizer_pre_hooks or names - {_REFUSE})


def local_step(
    optimizer: torch.optim.Optimizer,
    base: type[torch.optim.Optimizer],
    closure: Callable[[], Any] | None,
    options: dict[str, Any],
    *,
    sparse_again: bool,
    unscales_itself: bool,
) -> Any:
    """Take the step of the class `base`, without step hooks.

    sparse_again: whether to make dense gradients sparse again for it, see `resparsify`;
    unscales_itself: whether it reads GradScaler's attributes, which other optimizers refuse.
    """

    def evaluate() -> Any:
        assert closure is not None
        loss = closure()
        if sparse_again:
            resparsify(optimizer)
        return loss

    if sparse_again and closure is None:
        resparsify(optimizer)
    step: Any = base.step
    if getattr(step, "__code__", None) is _WRAPPER:
        step = step.__wrapped__
    # Hidden during the step, in case a subclass's step calls another wrapped step; GradScaler
    # deletes its attributes later.
    hidden = (_PRE, _POST) if unscales_itself else (_PRE, _POST, *SCALER_STATE)
    held = {key: optimizer.__dict__.pop(key) for key in hidden if key in optimizer.__dict__}
    optimizer.__dict__.update({_PRE: OrderedDict(), _POST: OrderedDict()})
    try:
        return step(optimizer, *(() if closure is None else (evaluate,)), **options)
    finally:
        optimizer.__dict__.update(held)


def resparsify(optimizer: torch.optim.Optimizer) -> None:
    """Make dense gradients sparse by rows again for SparseAdam, as Horovod does.

    SparseAdam refuses dense gradients, and does not change rows without a gradient.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients by GradScaler's scale, if it has set one."""
    scale = optimizer.__dict__.get("grad_scale")
    if scale is None:
        return
    # In float64, as in GradScaler: a subnormal's reciprocal is infinite in float32.
    inverse = scale.double().reciprocal().float()
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
