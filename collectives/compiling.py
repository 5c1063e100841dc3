"""Keep torch.compile from tracing methods that wait for other ranks: it breaks the graph there."""

from __future__ import annotations

from inspect import getmembers, isfunction
from typing import TypeVar

from torch.compiler import disable

_C = TypeVar("_C", bound=type)


def untraced(kind: _C) -> _C:
    """Decorate a class so that torch.compile calls its public methods instead of tracing them."""
    for name, function in getmembers(kind, isfunction):
        if not name.startswith("_"):
            setattr(kind, name, disable(function))
    return kind
