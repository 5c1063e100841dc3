"""Sphinx extension: the page `readme` is the repository's README, its links led to this site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", process)
    return {"parallel_read_safe": True}


def process(app: Any, docname: str, source: list[str]) -> None:
    if docname == "readme":
        source[0] = led_here((ROOT / "README.md").read_text())
    source[0] = source[0].replace("](../README.md", "](readme.md")


def led_here(readme: str) -> str:
    """The README with targets as seen from docs/; pages that are not on this site become words.

    >>> led_here("[a](docs/a.md#x) [b](b.py) [c](C.md) [d](https://d) [e](#e)")
    '[a](a.md#x) [b](../b.py) c [d](https://d) [e](#e)'
    """

    def lead(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        if re.match(r"#|[a-z]+:", target):
            return match[0]
        return text if target.endswith(".md") else f"[{text}](../{target})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", lead, readme)
