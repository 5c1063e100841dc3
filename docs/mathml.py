"""Sphinx extension: formulas as MathML, which browsers show without script or network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer `mathml`."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(inline, None), block_renderers=(block, None)
    )
    return {"parallel_read_safe": True}


def inline(writer: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """Write a displayed formula; a wide one scrolls on a phone."""
    formula = tex2mathml(node.astext(), as_block=True)
    writer.body.append(f'<div style="overflow-x: auto; padding: 0.5em 0">{formula}</div>\n')
    raise nodes.SkipNode
