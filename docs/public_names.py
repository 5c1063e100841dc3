"""Sphinx extension: the directive `public-names` documents the exports of a package.

It renders names of `__all__` as users import them: those that are its content, in that order, or
without content the package's docstring and then all names: functions, classes, errors and
constants, each in alphabetical order. autodoc's `automodule` would leave out constants and document
names of `collectives` a second time under `adasum`. tests/docs holds that no name is in no group.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

KINDS = ("function", "class", "exception", "data")
# Classes whose parts have files of their own; of an ancestor and what is above it nothing is shown.
INHERITED = {"Group": "object", "DistributedOptimizer": "Optimizer"}


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}


def kind_of(value: Any) -> str:
    """Return which of autodoc's directives documents the value."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def is_of_collectives(value: Any) -> bool:
    """Return whether the value, or the class of an instance, is defined in collectives."""
    return str(getattr(value, "__module__", "")).startswith("collectives.")


class PublicNames(SphinxDirective):
    """`.. public-names:: package`, or a group of its names, which then are its content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the package's reference."""
        package, named = self.arguments[0], " ".join(self.content).split()
        module = import_module(package)
        kinds, others = {}, []
        for name in named or sorted(module.__all__):
            value = getattr(module, name)
            if is_of_collectives(value) and package.partition(".")[0] != "collectives":
                others.append(name)
            elif not isinstance(value, ModuleType):
                kinds[name] = kind_of(value)
        lines = [] if named else [f".. automodule:: {package}", "   :no-members:", ""]
        order = [*kinds] if named else sorted(kinds, key=lambda name: KINDS.index(kinds[name]))
        for name in order:
            lines.append(f".. auto{kinds[name]}:: {package}.{name}")
            if name in INHERITED:
                lines.append(f"   :inherited-members: {INHERITED[name]}")
            lines.append("")
        if others:
            links = ", ".join(f":py:obj:`{name} <collectives.{name}>`" for name in others)
            lines += [f"Also here, from collectives: {links}.", ""]
        parent = nodes.Element()
        self.state.nested_parse(StringList(lines, source=package), 0, parent)
        return parent.children
