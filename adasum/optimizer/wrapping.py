"""The class of what DistributedOptimizer makes: a subclass of it and of the given optimizer's."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch

# The methods in which ranks may wait for each other, or which change what hooks do.
_COLLECTIVE = (
    *("step", "zero_grad", "synchronize", "clip_grad_norm_", "add_param_group"),
    "consolidate_state_dict",
)


def class_of(cls: type, base: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass of both; TypeError if instances of `base` keep more than a __dict__."""
    if any(getattr(each, "__slots__", ()) for each in base.__mro__):
        raise TypeError(
            f"optimizer must keep all attributes in its __dict__, which {base.__name__} does not: "
            "take __slots__ out of its class"
        )
    both: Any = type(base.__name__, (cls, base), {})
    for name in _COLLECTIVE:
        # torch.compile must not trace them.
        setattr(both, name, torch.compiler.disable(getattr(both, name)))
    # torch wraps the step of every other optimizer class, and would run step hooks twice.
    both.step.hooked = True
    return both


def keep_scheduler_patch(wrapper: Any) -> None:
    """Patch the wrapper's step as a scheduler that was made before has patched the optimizer's.

    By the two attributes that torch's schedulers look for, which are private to torch.
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
