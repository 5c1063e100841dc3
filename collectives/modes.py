"""torch's modes: methods that torch.compile leaves alone, and inference mode."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import getmembers, isfunction
from typing import TypeVar

import torch
from torch.compiler import disable

_C = TypeVar("_C", bound=type)


def untraced(kind: _C) -> _C:
    """Decorate a class so that torch.compile calls its public methods instead of tracing them.

    They wait for other ranks: its graph ends there.
    """
    for name, function in getmembers(kind, isfunction):
        if not name.startswith("_"):
            setattr(kind, name, disable(function))
    return kind


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
