"""Tell our `kernels` package from others of that name.

PyPI has another distribution whose import name is also `kernels`. Whichever comes first on
`sys.path` wins, and without this check the loser would show as an obscure error.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from types import ModuleType

_MARK = "__adasum__"


def require_our_kernels() -> ModuleType:
    """Import `kernels` and return it.

    Raises ImportError naming the file that was found when it is not adasum's own; nothing of a
    stranger is executed, so what it would need itself does not matter.
    """
    spec = importlib.util.find_spec("kernels")
    # A folder without __init__.py: what `pip uninstall kernels` leaves where both were installed.
    if spec is None or spec.origin is None:
        raise ImportError(
            "adasum's own package `kernels` is missing: run "
            "`pip install --force-reinstall --no-deps adasum`"
        )
    if not _is_ours(spec):
        raise ImportError(
            f"`import kernels` finds another distribution's package at {spec.origin}; adasum ships "
            "a package of the same name. Run `pip uninstall kernels`, then "
            "`pip install --force-reinstall --no-deps adasum`, or put adasum first on sys.path."
        )
    return importlib.import_module("kernels")


def _is_ours(spec: ModuleSpec) -> bool:
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source("kernels") if get_source is not None else None
    return source is not None and _MARK in source
