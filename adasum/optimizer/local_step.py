"""The wrapped optimizer's own step within a distributed one: hooks, GradScaler, sparse gradients.

Step hooks are meant to see the parameters that a step leaves. The wrapped optimizer's step would
run them itself, before its result is reduced or broadcast, and once for every bucket.
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

# What GradScaler sets on an optimizer for the time of a step.
SCALER_STATE = ("grad_scale", "found_inf")
# Not public, but torch lists an optimizer's hooks nowhere else.
_REFUSE = "refuse_plain_steps"
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# torch wraps the step of every optimizer's class in it, to run the hooks.
with_hooks: Any = torch.optim.Optimizer.profile_hook_step
# How to tell a step that torch has wrapped from any other decorated one.
_WRAPPER = with_hooks(lambda: None).__code__


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_plain_steps(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Have a step of the optimizer raise that is not its wrapper's, while that is there."""
    reference = weakref.ref(wrapper)

    def refuse(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if reference() not in (None, stepping):
            raise OptimizerOrderError(
                "step() of the optimizer that was given to DistributedOptimizer, which reduces "
                "nothing: call that of the one that DistributedOptimizer returned, of which "
                "learning-rate schedulers have to be made, too"
            )

    refuse.__name__ = _REFUSE
    optimizer.register_step_pre_hook(refuse)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook of a user's wants to be called before the step."""
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

    sparse_again: whether gradients that were made dense are to be sparse for it, see `resparsify`;
    unscales_itself: whether it reads what GradScaler sets, which others refuse.
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
    # What a subclass's step calls may be wrapped, too. GradScaler deletes its own afterwards.
    hidden = (_PRE, _POST) if unscales_itself else (_PRE, _POST, *SCALER_STATE)
    held = {key: optimizer.__dict__.pop(key) for key in hidden if key in optimizer.__dict__}
    optimizer.__dict__.update({_PRE: OrderedDict(), _POST: OrderedDict()})
    try:
        return step(optimizer, *(() if closure is None else (evaluate,)), **options)
    finally:
        optimizer.__dict__.update(held)


def resparsify(optimizer: torch.optim.Optimizer) -> None:
    """Make gradients that were made dense sparse by rows again for SparseAdam, as Horovod does.

    It refuses dense ones, and leaves what belongs to rows without a gradient alone.
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
    # By float64, as GradScaler does it: a subnormal's reciprocal is infinite in float32.
    inverse = scale.double().reciprocal().float()
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
