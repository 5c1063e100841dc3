"""The communication hook for Lightning: a callback, to use with a DistributedDataParallel strategy.

from adasum.integrations.lightning import HookCallback

callback = HookCallback(adasum.HookState(op=adasum.Adasum))
trainer = lightning.Trainer(devices=4, strategy="ddp", callbacks=[callback])
"""

from __future__ import annotations

from typing import Any

from adasum.ddp import HookState, require_state
from adasum.integrations.registration import refuse_distributed_optimizer, register

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        # The same package under its older name.
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise ImportError(
            "adasum.integrations.lightning needs Lightning: pip install lightning"
        ) from error

__all__ = ["HookCallback"]


class HookCallback(Callback):
    """Registers the hook when training starts.

    It also does so on CPUs, unlike DDPStrategy, which silently ignores its `ddp_comm_hook` there.
    Gradients are reduced before Lightning clips them. With `accumulate_grad_batches` each rank adds
    up its batches, and the sum is reduced once. With one device there is no wrapper and nothing to
    reduce. Checkpoints contain nothing of the callback.

    Args:
        state: How to reduce.

    Raises:
        TypeError: `state` is not a HookState.
        ValueError: From `fit`: the strategy does not wrap the model in DistributedDataParallel, or
            the optimizer is a DistributedOptimizer.
        RuntimeError: From `fit`: the strategy has registered another hook.
    """

    def __init__(self, state: HookState) -> None:
        require_state(state)
        self.state = state

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook."""
        for optimizer in trainer.optimizers:
            refuse_distributed_optimizer(optimizer)
        strategy = trainer.strategy
        advice = f"{type(strategy).__name__} reduces by itself; use strategy='ddp' or a DDPStrategy"
        register(strategy.model, self.state, trainer.world_size, advice)
