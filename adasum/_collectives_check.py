"""Refuse a `collectives` package that is not ours; ours does the same for `kernels`."""

from __future__ import annotations

import runpy
from pathlib import Path


def require_our_collectives() -> None:
    """Import `collectives`; raise ImportError with its file if another distribution owns it.

    The check is a file of our `collectives`, next to this package. It is still there if another
    distribution has overwritten the `__init__.py` of `collectives`.
    """
    check = Path(__file__).parents[1] / "collectives" / "_own_packages.py"
    if not check.exists():
        raise ImportError(
            "adasum's own package `collectives` is missing: run `pip install --force-reinstall "
            "--no-deps .` in adasum's checkout, or with its wheel for `.`"
        )
    runpy.run_path(str(check))["require_ours"]("collectives")


require_our_collectives()
