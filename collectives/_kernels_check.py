"""Tell our `kernels` package from others of that name.

PyPI has another distribution whose import name is also `kernels`. Whichever comes first on
`sys.path` wins, and without this check the loser would show as an obscure AttributeError.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def require_our_kernels() -> ModuleType:
    """Import `kernels` and return it.

    Raises ImportError naming the file that was found when it is not adasum's own.
    """
    module = importlib.import_module("kernels")
    if getattr(module, "__adasum__", False) is not True:
        where = getattr(module, "__file__", None) or list(getattr(module, "__path__", ["unknown"]))
        raise ImportError(
            f"`import kernels` found another distribution's package at {where}; adasum ships a "
            "package of the same name. Run `pip uninstall kernels`, then "
            "`pip install --force-reinstall --no-deps adasum`, or put adasum first on sys.path."
        )
    return module
