"""The version of all three packages, their `__version__`."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path


def _version() -> str:
    """Return a checkout's own version; without a checkout, the installed distribution's version."""
    # There may be an installed adasum of another version and a checkout found by PYTHONPATH.
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.exists():
        found = re.search(r'^name = "adasum"\nversion = "(.+)"', project.read_text(), re.MULTILINE)
        if found:
            return found[1]
    try:
        return importlib.metadata.version("adasum")
    except importlib.metadata.PackageNotFoundError:
        # The packages were copied without their installation's metadata.
        return "0+unknown"


__version__ = _version()
