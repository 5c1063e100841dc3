"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, legible as plain text; all columns but the first right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(header), line(rule), *map(line, lines)]
