"""Reductions of a training step that a user's modes do not see.

A mode that counts or logs operations, such as FlopCounterMode, is for the model's. What is reduced
has its values by then, and the memory that a reduction keeps must not be a mode's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from collectives.validation import active_mode


@contextmanager
def outside_modes() -> Iterator[None]:
    """Leave the modes that this thread is in, for a `with` block or a decorated function."""
    if not active_mode():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
