"""Registering the hook on a user's model that a framework has wrapped."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from adasum.ddp import HookState, ddp_hook
from adasum.optimizer.distributed_optimizer import DistributedOptimizer

# A framework may train twice with one wrapper, and torch accepts one hook per wrapper.
_REGISTERED: WeakKeyDictionary[nn.Module, HookState] = WeakKeyDictionary()


def register(model: nn.Module, state: HookState, ranks: int, advice: str) -> None:
    """Register the hook on every DistributedDataParallel in `model`, compiled or not.

    On a single rank frameworks do not wrap the model; then nothing is registered.

    Args:
        model: The model as the framework trains it.
        state: How to reduce.
        ranks: The number of ranks that the framework trains on.
        advice: For the error if several ranks have no DistributedDataParallel.

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
    """Raise ValueError for an optimizer that would reduce the hook's results again."""
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            "the optimizer is an adasum.DistributedOptimizer, which would reduce the hook's "
            "results again: pass the plain optimizer"
        )
