"""Keeping torch.compile out of what waits for other ranks: it calls that, and traces around it."""

from __future__ import annotations

from inspect import getmembers, isfunction
from typing import TypeVar

from torch.compiler import disable

_C = TypeVar("_C", bound=type)


def untraced(kind: _C) -> _C:
    """Have torch.compile call the public methods of a class; a decorator of it."""
    for name, function in getmembers(kind, isfunction):
        if not name.startswith("_"):
            setattr(kind, name, disable(function))
    return kind
