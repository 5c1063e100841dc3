"""Registering the hook on what a framework has made of the user's model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adasum.ddp import HookState, ddp_hook
from adasum.optimizer.distributed_optimizer import DistributedOptimizer

# A framework that trains twice may wrap the model once, and torch takes one hook a wrapper.
_REGISTERED: WeakKeyDictionary[nn.Module, HookState] = WeakKeyDictionary()


def register(model: nn.Module, state: HookState, ranks: int, advice: str) -> None:
    """Register the hook on every DistributedDataParallel in `model`, compiled or not.

    A framework leaves the model of a single rank as it is, and so does this.

    Args:
        model: As the framework trains it.
        state: How to reduce.
        ranks: How many ranks the framework trains on.
        advice: What to do where no DistributedDataParallel is found on several ranks.

    Raises:
        RuntimeError: The wrapper has another hook.
        ValueError: Gradients are reduced by something other than DistributedDataParallel.
    """
    wrappers = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if not wrappers and any(isinstance(each, DataParallel) for each in model.modules()):
        raise ValueError(
            "the model is in torch.nn.DataParallel, one process for all GPUs, which takes no "
            "communication hook: start a rank for each GPU with torchrun"
        )
    if not wrappers and ranks > 1:
        raise ValueError(
            f"no DistributedDataParallel in the {type(model).__name__} that {ranks} ranks train: "
            f"{advice}"
        )
    for wrapper in wrappers:
        _register_on(wrapper, state)


def _register_on(wrapper: DistributedDataParallel, state: HookState) -> None:
    if _REGISTERED.get(wrapper) is state:
        return
    try:
        wrapper.register_comm_hook(state, ddp_hook)
    except RuntimeError as error:
        if "once" not in str(error):
            raise
        raise RuntimeError(
            "the model's DistributedDataParallel has another communication hook, and takes one: "
            "leave out the framework's own setting of a hook, or the second callback"
        ) from error
    _REGISTERED[wrapper] = state


def refuse_distributed_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that would reduce once more what the hook has reduced."""
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            "the optimizer is an adasum.DistributedOptimizer, which would reduce the hook's "
            "results again: pass the plain optimizer"
        )
