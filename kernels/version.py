"""The version, which all three packages have as `__version__`."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path


def _version() -> str:
    """Return a checkout's own version, or else that of the installed distribution."""
    # An installed adasum of another version may be beside a checkout that is found by PYTHONPATH.
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.exists():
        found = re.search(r'^name = "adasum"\nversion = "(.+)"', project.read_text(), re.MULTILINE)
        if found:
            return found[1]
    try:
        return importlib.metadata.version("adasum")
    except importlib.metadata.PackageNotFoundError:
        # The packages were copied without what their installation says of them.
        return "0+unknown"


__version__ = _version()
