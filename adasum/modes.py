"""Reductions of a training step that a user's modes do not see.

A mode that counts or logs operations, such as FlopCounterMode, is for the model's. What is reduced
has its values by then, and the memory that a reduction keeps must not be a mode's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from collectives.validation import active_mode

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function, run outside of the modes that this thread is in."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not active_mode():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for _ in range(_len_torch_function_stack()):
                stack.enter_context(_pop_mode_temporarily())
            return function(*args, **kwargs)

    return call
