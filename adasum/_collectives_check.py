"""Refuse another `collectives` than ours, as that refuses another `kernels`."""

from __future__ import annotations

import runpy
from pathlib import Path


def require_our_collectives() -> None:
    """Import `collectives`; ImportError names the file where it is another distribution's.

    The check is a file of our `collectives`, beside this package, also where another distribution
    has overwritten that one's __init__.py.
    """
    check = Path(__file__).parents[1] / "collectives" / "_own_packages.py"
    if not check.exists():
        raise ImportError(
            "adasum's own package `collectives` is missing: run `pip install --force-reinstall "
            "--no-deps .` in adasum's checkout, or with its wheel for `.`"
        )
    runpy.run_path(str(check))["require_ours"]("collectives")


require_our_collectives()
