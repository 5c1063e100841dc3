"""The README as PyPI can show it; all else is in pyproject.toml.

PyPI resolves no relative links and no relative pictures: they become absolute where
`project.urls` names the repository as `Source`, else links become their text and pictures go.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_pypi(match: re.Match[str]) -> str:
    """Return what becomes of a relative link or picture."""
    picture, text, target = match.groups()
    if SOURCE:
        return f"{picture}[{text}]({SOURCE[1]}/{'raw' if picture else 'blob'}/main/{target})"
    return "" if picture else text


setup(
    long_description=LINK.sub(on_pypi, (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
