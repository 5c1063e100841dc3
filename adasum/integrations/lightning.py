"""The communication hook in Lightning: a callback beside a strategy of DistributedDataParallel.

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

    It does so on CPUs too, where DDPStrategy leaves out its own `ddp_comm_hook` without a word.
    Gradients are reduced before Lightning clips them. With `accumulate_grad_batches` the sum of a
    rank's batches is reduced, once. On one device there is nothing to reduce, and no wrapper.
    A checkpoint holds nothing of it.

    Args:
        state: How to reduce.

    Raises:
        TypeError: It is no HookState.
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
