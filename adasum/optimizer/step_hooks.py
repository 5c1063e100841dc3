"""The step hooks of an optimizer, run around a whole distributed step.

They are meant to see the parameters that a step leaves. The wrapped optimizer's step would run them
itself, before its result is reduced or broadcast, and once for every bucket.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from adasum.optimizer.errors import OptimizerOrderError

# Not public, but torch lists an optimizer's hooks nowhere else.
_REFUSE = "refuse_plain_steps"
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# How to tell a step that torch has wrapped, to run the hooks, from any other decorated one.
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


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


def run_pre_hooks(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run what is to see the gradients that the step takes; return the step's new arguments.

    `args` are those behind the optimizer.
    """
    args = (optimizer, *args)
    for hook in chain(_global_optimizer_pre_hooks.values(), getattr(optimizer, _PRE).values()):
        changed = hook(optimizer, args, options)
        if changed is None:
            continue
        if not (isinstance(changed, tuple) and len(changed) == 2):
            raise RuntimeError(
                f"{hook} must return None or a tuple of (new_args, new_kwargs), not {changed!r}"
            )
        args, options = changed
    return args[1:], options


def run_post_hooks(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Run what is to see the parameters that the step leaves; arguments as for `run_pre_hooks`."""
    for hook in chain(getattr(optimizer, _POST).values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, (optimizer, *args), options)


@contextmanager
def without_hooks(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Give a step of the optimizer's class that runs no hooks."""
    held = {key: optimizer.__dict__[key] for key in (_PRE, _POST)}
    optimizer.__dict__.update({key: OrderedDict() for key in held})
    try:
        everyone = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        if everyone and getattr(step, "__code__", None) is _WRAPPER:
            step = step.__wrapped__  # type: ignore[attr-defined]
        yield step
    finally:
        optimizer.__dict__.update(held)
