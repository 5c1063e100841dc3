"""The communication hook for Hugging Face's Trainer: a callback, since it has no setting for hooks.

from adasum.integrations.transformers import HookCallback

trainer = Trainer(model, arguments, train_dataset=examples)
trainer.add_callback(HookCallback(trainer, adasum.HookState(op=adasum.Adasum)))
"""

from __future__ import annotations

from typing import Any

from adasum.ddp import HookState, require_state
from adasum.integrations.registration import refuse_distributed_optimizer, register

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError(
        "adasum.integrations.transformers needs Hugging Face's transformers: "
        "pip install 'transformers[torch]'"
    ) from error

__all__ = ["HookCallback"]


class HookCallback(TrainerCallback):
    """Registers the hook when training begins, on the model as the Trainer has wrapped it.

    Gradients are reduced before the Trainer clips them, which it does unless `max_grad_norm=0`.
    With `gradient_accumulation_steps` each rank adds up its batches, and the sum is reduced once.
    With one process there is no wrapper and nothing to reduce. Checkpoints contain nothing of the
    callback.

    Args:
        trainer: The Trainer that the callback is added to, since callbacks are only passed the
            model without its wrapper.
        state: How to reduce.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: From `train`: with several processes the model is not in a
            DistributedDataParallel; the optimizer is a DistributedOptimizer; or one process uses
            several GPUs.
    """

    def __init__(self, trainer: Trainer, state: HookState) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
        require_state(state)
        self.trainer = trainer
        self.state = state

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register the hook; `state` is the Trainer's."""
        optimizer = self.trainer.optimizer
        # Accelerate's wrapper keeps the Trainer's optimizer in this attribute.
        refuse_distributed_optimizer(getattr(optimizer, "optimizer", optimizer))
        advice = (
            "DeepSpeed and FSDP reduce by themselves; leave them out, and add the callback to the "
            "Trainer that it was made with"
        )
        register(self.trainer.model_wrapped, self.state, args.world_size, advice)
