"""torch's modes: what runs outside of them, what torch.compile leaves alone, inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import getmembers, isfunction
from typing import TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.compiler import disable
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from collectives.validation import active_mode

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


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave the modes that this thread is in, for a `with` block or a decorated function.

    A mode that counts or logs operations, such as FlopCounterMode, is for the model's. What is
    reduced has its values by then, and the memory that a reduction keeps must not be a mode's.
    """
    if not active_mode():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
