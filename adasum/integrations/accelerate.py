"""The communication hook for Hugging Face Accelerate, whose own setting knows torch's hooks only.

from adasum.integrations.accelerate import register_hook

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
register_hook(accelerator, model, adasum.HookState(op=adasum.Adasum))
"""

from __future__ import annotations

from torch import nn

from adasum.ddp import HookState, require_state
from adasum.integrations.registration import register

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ImportError(
        "adasum.integrations.accelerate needs Accelerate: pip install accelerate"
    ) from error

__all__ = ["register_hook"]


def register_hook(accelerator: Accelerator, model: nn.Module, state: HookState) -> None:
    """Register the hook on a model that `accelerator.prepare` has returned.

    Gradients are reduced before `accelerator.clip_grad_norm_` clips them. Within
    `accelerator.accumulate` each rank adds up its batches, and the sum is reduced once. With one
    process there is no wrapper and nothing to reduce.

    Args:
        accelerator: The one that prepared the model.
        model: The model that `prepare` returned, compiled or not.
        state: How to reduce.

    Raises:
        TypeError: An argument has the wrong type, for example if `model` and `accelerator` are
            exchanged.
        ValueError: There are several processes, and the model is not in a DistributedDataParallel:
            it was not prepared, or is for DeepSpeed or FSDP.
        RuntimeError: `DistributedDataParallelKwargs` has set another hook.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    require_state(state)
    advice = (
        "pass the model that accelerator.prepare returned; with DeepSpeed, FSDP or Megatron "
        f"(here: {accelerator.distributed_type.value}) there is none"
    )
    register(model, state, accelerator.num_processes, advice)
