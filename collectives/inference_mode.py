"""torch's inference mode, entered only where that changes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["inference_mode"]


def inference_mode(enabled: bool) -> AbstractContextManager[None]:
    """Return what sets inference mode for a while, and does nothing where it is set so already.

    What torch.inference_mode holds restores autograd's mode, too, when it is destroyed. Where an
    exception of a signal's handler comes while it begins, that is when the traceback is dropped, in
    any thread: autograd could then be off in a thread that nothing interrupted.
    """
    if torch.is_inference_mode_enabled() is enabled:
        return nullcontext()
    return torch.inference_mode(enabled)
