"""torch's inference mode, entered only if that changes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["inference_mode"]


def inference_mode(enabled: bool) -> AbstractContextManager[None]:
    """Return a context with inference mode on or off, which does nothing if it is so already.

    torch.inference_mode also restores the autograd mode, in the destructor of an object that it
    holds. If a signal handler raises while the context is entered, the traceback keeps that object,
    which is then destroyed with it, maybe in another thread: autograd could be off there from then
    on. So the context is entered no more often than needed.
    """
    if torch.is_inference_mode_enabled() is enabled:
        return nullcontext()
    return torch.inference_mode(enabled)
