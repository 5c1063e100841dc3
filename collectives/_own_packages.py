"""Tell our packages `kernels` and `collectives` from others with these names.

PyPI has other distributions of both names, with the same import names. Python imports the first one
on `sys.path`; if that is the wrong one, this check raises an error, instead of a missing attribute
later. The file imports nothing of its own package: adasum runs it by its path, since
`import collectives` may find the wrong one.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from types import ModuleType

_SIGN = "__adasum__"
# Not by name: no package index has it, so another package might be installed.
_ANEW = (
    "run `pip install --force-reinstall --no-deps .` in adasum's checkout, "
    "or with its wheel for `.`"
)


def require_ours(name: str) -> ModuleType:
    """Import adasum's own package of this name and return it.

    Raises:
        ImportError: It is missing, or another distribution's package was found. That package is not
            executed, so that its own imports cannot fail first.
    """
    spec = importlib.util.find_spec(name)
    # No origin: a folder without __init__.py. When pip uninstalls the other distribution, it also
    # removes our files of the same names.
    if spec is None or spec.origin is None:
        raise ImportError(f"adasum's own package `{name}` is missing: {_ANEW}")
    if not _is_ours(spec):
        raise ImportError(
            f"`import {name}` finds another distribution's package at {spec.origin}; adasum ships "
            f"a package of the same name. Run `pip uninstall {name}`, then {_ANEW}, or put adasum "
            "first on sys.path."
        )
    return importlib.import_module(name)


def _is_ours(spec: ModuleSpec) -> bool:
    # Search the source: to read an attribute, the module would have to run.
    get_source = getattr(spec.loader, "get_source", None)
    source = get_source(spec.name) if get_source is not None else None
    return source is not None and _SIGN in source
