"""Sphinx extension: docstrings here are plain prose, which this turns into reStructuredText.

`name` becomes code, "name: what it is." in the text becomes an entry of the list of parameters,
and lines indented by four become a block of code. Everything else is escaped and shown as it is.
"""

from __future__ import annotations

import inspect
import re
from typing import Any


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    parameters = parameters_of(obj)
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    lines[:] = []
    for block in filter(str.strip, blocks):
        if all(line.startswith("    ") for line in block.splitlines()):
            lines += ["::", "", *block.splitlines(), ""]
            continue
        text = " ".join(block.split())
        prose, entries, rest = split_parameters(text, parameters)
        if prose:
            lines += [escape(prose), ""]
        if entries:
            lines += [":Parameters:", *(f"   - **{escape(k)}**: {escape(v)}" for k, v in entries)]
        lines += ["", escape(rest), ""]


def parameters_of(obj: Any) -> set[str]:
    try:
        return set(inspect.signature(obj).parameters) if callable(obj) else set()
    except (TypeError, ValueError):
        return set()


def split_parameters(text: str, parameters: set[str]) -> tuple[str, list[tuple[str, str]], str]:
    """The text before the first "name: ", each name with what it is, and the text after these.

    >>> split_parameters("Moves x. x: thing. y, z: places. Raises ValueError.", {"x", "y", "z"})
    ('Moves x.', [('x', 'thing.'), ('y, z', 'places.')], 'Raises ValueError.')
    """
    names = "|".join(re.escape(each) for each in sorted(parameters))
    if not names:
        return text, [], ""
    prose, *parts = re.split(rf"(?:^|(?<=[.:;] ))((?:{names})(?:, (?:{names}))*): ", text)
    if not parts:
        return text, [], ""
    last, *rest = re.split(
        r"(?<=\.) (?=Raises |Collective[ ;.:]|\w+Error\b)", parts.pop(), maxsplit=1
    )
    meanings = [*parts[1::2], last]
    entries = [(name, meaning.strip()) for name, meaning in zip(parts[::2], meanings, strict=True)]
    return prose.strip(), entries, "".join(rest)


def escape(text: str) -> str:
    """reStructuredText that shows the text, with `code` as code.

    >>> escape("`a_` is |a|^2")
    '``a_`` is \\\\|a\\\\|^2'
    """
    parts = re.split(r"`+([^`]+)`+", text)
    return "".join(
        f"``{part}``" if i % 2 else re.sub(r"([\\*_|<>])", r"\\\1", part)
        for i, part in enumerate(parts)
    )
