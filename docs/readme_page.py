"""Sphinx extension: the page `readme` shows the repository's README, with links into this site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def setup(app: Any) -> dict[str, bool]:
    """Connect to the event that Sphinx emits for every source file."""
    app.connect("source-read", insert_readme)
    return {"parallel_read_safe": True}


def insert_readme(app: Any, docname: str, source: list[str]) -> None:
    """Replace the page's text by the README, and links to the README by links to the page."""
    if docname == "readme":
        source[0] = relink((ROOT / "README.md").read_text())
    source[0] = source[0].replace("](../README.md", "](readme.md")


def relink(readme: str) -> str:
    """Return the README with link targets relative to docs/.

    A link to a page that is not on this site becomes plain text.

    >>> relink("[a](docs/a.md#x) [b](b.py) [c](C.md) [d](https://d) [e](#e)")
    '[a](a.md#x) [b](../b.py) c [d](https://d) [e](#e)'
    """

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        if re.match(r"#|[a-z]+:", target):
            return match[0]
        return text if target.endswith(".md") else f"[{text}](../{target})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", replace, readme)
