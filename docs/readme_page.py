"""Sphinx extension: the landing page begins with the README's first screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The line of docs/index.md that the first screen replaces.
POINTER = "The [README](../README.md) is the first page.\n"


def setup(app: Any) -> dict[str, bool]:
    """Connect to the event that Sphinx emits for every source file."""
    app.connect("source-read", insert_readme)
    return {"parallel_read_safe": True}


def insert_readme(app: Any, docname: str, source: list[str]) -> None:
    """Put the README's first screen into the landing page."""
    if docname == "index":
        if POINTER not in source[0]:
            raise ValueError(f"docs/index.md lacks the line {POINTER!r}")
        readme = relink(first_screen((ROOT / "README.md").read_text()))
        source[0] = source[0].replace(POINTER, readme)


def first_screen(readme: str) -> str:
    r"""Return the README up to its first section, without its title.

    >>> first_screen("# title\n\ntext\n\n## Use it\n\nmore")
    '\ntext\n\n'
    """
    return readme.partition("\n## ")[0].partition("\n")[2] + "\n"


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
