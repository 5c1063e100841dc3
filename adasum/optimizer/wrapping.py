"""The class of wrapped optimizers: a subclass of DistributedOptimizer and the given class."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from adasum.optimizer.errors import OptimizerOrderError
from collectives.modes import untraced

# Methods that may wait for other ranks, or that change the state of hooks.
_COLLECTIVE = (
    *("step", "zero_grad", "synchronize", "clip_grad_norm_", "add_param_group"),
    "consolidate_state_dict",
)
_RIGHT = (
    "method='gradient' (or op=Average without mode), by which gradients are reduced in backward"
)


def class_of(cls: type, base: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass of both; raise TypeError if instances of `base` have slots."""
    if any(getattr(each, "__slots__", ()) for each in base.__mro__):
        raise TypeError(
            f"optimizer must keep all attributes in its __dict__, which {base.__name__} does not: "
            "take __slots__ out of its class"
        )
    both: Any = type(base.__name__, (cls, base), {})
    for name in _COLLECTIVE:
        # torch.compile must not trace them.
        setattr(both, name, untraced(getattr(both, name)))
    # torch wraps the step of every other optimizer class, and would run step hooks twice.
    both.step.hooked = True
    return both


def keep_scheduler_patch(wrapper: Any) -> None:
    """Patch the wrapper's step if an earlier scheduler has patched the optimizer's.

    It sets the two attributes that torch's schedulers look for, which are private to torch.
    """
    if wrapper.__dict__.pop("step", None) is None:
        return
    reference = weakref.ref(wrapper)

    @wraps(type(wrapper).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target: Any = reference()
        target._opt_called = True
        return type(target).step(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapper.step = step


def guard_methods(both: type, kind: type[torch.optim.Optimizer], method: str) -> None:
    """Guard, in the class `both`, the public methods of `kind` that torch's optimizers lack.

    SAM has first_step() and second_step(), schedule-free optimizers eval() and train(): they change
    parameters outside of step(). That is correct if gradients are reduced in backward. If steps are
    reduced, or each rank steps a part, such a change would affect only this rank, and is refused.

    Raises ValueError if the optimizer has train() and eval(), which change parameters. `method` are
    the arguments that select the method, for errors.
    """
    functions = {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    }
    if "train" in functions and "eval" in functions:
        raise ValueError(
            f"{kind.__name__} changes parameters in train() and eval() by its state, which differs "
            f"between ranks with {method}: pass {_RIGHT}"
        )
    for name, function in functions.items():
        setattr(both, name, _guarded(function, method))


def _guarded(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return a method that raises OptimizerOrderError if it changes parameters outside step()."""

    @wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        before = [each._version for each in parameters]
        result = function(self, *args, **options)
        held = self._adasum
        changed = [each._version for each in parameters] != before
        if changed and not held.stepping and not held.settings.one_rank:
            raise OptimizerOrderError(
                f"{function.__name__}() changed parameters outside of step(), where {method} "
                f"reduces nothing, so they differ from the other ranks' now: pass {_RIGHT}"
            )
        return result

    return call
