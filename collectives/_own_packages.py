"""Tell our packages `kernels` and `collectives` from others of these names.

PyPI has another distribution of either name, with the same import name. Whichever comes first on
`sys.path` wins, and without this check the loser would show as an obscure error. It needs nothing
of the package that it is in: adasum runs it as a file, since `import collectives` may find another.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from types import ModuleType

_SIGN = "__adasum__"


def require_ours(name: str) -> ModuleType:
    """Import the package of this name and return it.

    Raises ImportError naming the file that was found when it is not adasum's own; nothing of
    that file is executed, so what it would need itself does not matter.
    """
    spec = importlib.util.find_spec(name)
    # A folder without __init__.py: what pip leaves of ours when it uninstalls the other one.
    if spec is None or spec.origin is None:
        raise ImportError(
            f"adasum's own package `{name}` is missing: run "
            "`pip install --force-reinstall --no-deps adasum`"
        )
    if not _is_ours(spec):
        raise ImportError(
            f"`import {name}` finds another distribution's package at {spec.origin}; adasum ships "
            f"a package of the same name. Run `pip uninstall {name}`, then "
            "`pip install --force-reinstall --no-deps adasum`, or put adasum first on sys.path."
        )
    return importlib.import_module(name)


def _is_ours(spec: ModuleSpec) -> bool:
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(spec.name) if get_source is not None else None
    return source is not None and _SIGN in source
