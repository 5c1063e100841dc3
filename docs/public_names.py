"""Sphinx extension: the directive `public-names`, the reference of all that a package exports.

The package's own docstring, then every name of its `__all__` under the name it is imported by:
functions, then classes, errors and constants, each in alphabetical order.
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


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}


def kind_of(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def from_collectives(value: Any) -> bool:
    """Whether the value, or its class where it is an instance, is defined there."""
    return str(getattr(value, "__module__", "")).startswith("collectives.")


class PublicNames(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = import_module(package)
        kinds, others = {}, []
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if from_collectives(value) and package != "collectives":
                others.append(name)
            elif not isinstance(value, ModuleType):
                kinds[name] = kind_of(value)
        lines = [f".. automodule:: {package}", "   :no-members:", ""]
        for name in sorted(kinds, key=lambda name: KINDS.index(kinds[name])):
            lines += [f".. auto{kinds[name]}:: {package}.{name}", ""]
        if others:
            links = ", ".join(f":py:obj:`{name} <collectives.{name}>`" for name in others)
            lines += [f"Also here, from collectives: {links}.", ""]
        place = nodes.Element()
        self.state.nested_parse(StringList(lines, source=package), 0, place)
        return place.children
