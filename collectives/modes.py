"""torch's modes: helpers to run outside of them, outside of torch.compile, in inference mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from inspect import getmembers, isfunction
from typing import Any, TypeVar, cast

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from collectives.validation import active_mode

_C = TypeVar("_C", bound=type)
_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Decorate a function that waits for other ranks: torch.compile ends its graph and calls it.

    The effect is the same as torch.compiler.disable's, but this uses torch._dynamo only if it is
    already imported: importing it takes nearly as long as importing torch.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            from torch._dynamo.eval_frame import skip_code

            disabled = torch.compiler.disable(function)
            # Otherwise torch.compile would compile this code, which all such functions share.
            skip_code(call.__code__)  # type: ignore[attr-defined]
        return disabled(*args, **kwargs)

    return cast("_F", call)


def untraced_methods(kind: _C) -> _C:
    """Decorate a class whose public methods are all `untraced`."""
    for name, function in getmembers(kind, isfunction):
        if not name.startswith("_"):
            setattr(kind, name, untraced(function))
    return kind


def inference_mode(enabled: bool) -> AbstractContextManager[None]:
    """Return a context with inference mode on or off, which does nothing if that is the state.

    torch.inference_mode also restores the autograd mode, in the destructor of an object that it
    holds. If a signal handler raises while the context is entered, the traceback keeps that object
    and destroys it later, maybe in another thread: autograd could then stay off there. So the
    context is only entered if needed.
    """
    if torch.is_inference_mode_enabled() is enabled:
        return nullcontext()
    return torch.inference_mode(enabled)


def no_grad() -> AbstractContextManager[None]:
    """Return a context with autograd off, which does nothing if it is, as during backward."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave this thread's modes, for a `with` block or a decorated function.

    Modes that count or log operations, such as FlopCounterMode, are meant for the model's
    operations. The tensors to reduce already have values, and a mode must not create the memory
    that a reduction keeps.
    """
    if not active_mode():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
