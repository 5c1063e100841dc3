"""Making one object of a DistributedOptimizer, a method and the optimizer that is wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from adasum.optimizer.backward_hooks import BackwardHooks
from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.consistency.membership import Membership
from adasum.optimizer.distributed_mixin import COLLECTIVE_METHODS, DistributedMixin
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.outside_steps import guarded, methods_of, require_steps_alone
from adasum.optimizer.pass_tree import PassTree
from adasum.optimizer.step_hooks import refuse_plain_steps
from adasum.optimizer.wrapped_step import Settings


def wrap(
    wrapper: Any,
    optimizer: torch.optim.Optimizer,
    method: type[DistributedMixin],
    named: Sequence[Named],
    buckets: Sequence[Sequence[Named]],
    settings: Settings,
) -> None:
    """Make `wrapper` an instance of a subclass of its class, `method` and the optimizer's class.

    It shares the __dict__ of the optimizer, which is left as it is but for what is added there:
    load_state_dict on either replaces state and param_groups for both. `named` is (name, parameter)
    of every parameter, in registration order, and `buckets` the same pairs in the order of their
    reductions.
    """
    base = type(optimizer)
    # Not in __new__, so that the one signature that editors and type checkers see is __init__'s.
    both = type(base.__name__, (type(wrapper), method, base), {})
    _override(both, method, base, settings)
    try:
        wrapper.__class__ = both
    except TypeError as error:
        raise TypeError(
            f"optimizer must keep all attributes in its __dict__, which {base.__name__} does not: "
            "take __slots__ out of its class"
        ) from error
    wrapper.__dict__ = optimizer.__dict__
    wrapper._adasum_base = base
    wrapper._adasum_settings = settings
    wrapper._adasum_unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    wrapper._adasum_membership = Membership(optimizer.param_groups)
    wrapper._prepare()
    wrapper._adasum_hooks = BackwardHooks(
        wrapper,
        named,
        buckets,
        passes=settings.passes,
        one_rank=settings.one_rank,
        early=method._adasum_early and not settings.one_rank,
        final=method._adasum_final,
        before=(lambda _: False) if settings.one_rank else method._wants_before,
        tree=_pass_tree(settings) if issubclass(method, GradientMethod) else None,
    )
    _keep_scheduler_patch(wrapper)
    if not settings.one_rank:
        refuse_plain_steps(optimizer, wrapper)


def _pass_tree(settings: Settings) -> PassTree | None:
    """Return what adds backward passes, where the order of a sum goes down to them."""
    op = settings.reducer.op
    return PassTree(divides=bool(op.averages) and settings.one_rank) if op.ordered else None


def _override(
    both: Any,
    method: type[DistributedMixin],
    base: type[torch.optim.Optimizer],
    settings: Settings,
) -> None:
    """Keep torch.compile out of methods in which ranks wait for each other, and guard others."""
    for name in COLLECTIVE_METHODS:
        setattr(both, name, torch.compiler.disable(getattr(both, name)))
    # torch wraps the step of every other optimizer class, and would run step hooks twice.
    both.step.hooked = True
    if settings.one_rank or method is GradientMethod:
        return
    require_steps_alone(base, method._adasum_asked)
    for name, function in methods_of(base):
        setattr(both, name, guarded(function, method._adasum_asked))


def _keep_scheduler_patch(wrapper: Any) -> None:
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
