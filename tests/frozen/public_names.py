"""The public names of the packages, as users import and call them.

A line for each name: of a function its parameters and their defaults, of a class those that make it
and of its methods, its properties and the attributes that its docstring has. Annotations are left
out, as one meaning can be written in several ways; `**options` of a TypedDict are its keys, as
callers see.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

PATH = Path(__file__).parent / "public_names.txt"
MODULES = ("kernels", "collectives", "collectives.cost", "adasum", "adasum.orthogonality")
MODULES += ("adasum.gradient_recorder",)
OURS = ("kernels", "collectives", "adasum")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:(?:    .*)?(?:\n|\Z))+)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+):", re.MULTILINE)


def listed() -> str:
    """The whole list, a name a line."""
    lines = [line for name in MODULES for line in _of_module(name)]
    return "\n".join(lines) + "\n"


def _of_module(module_name: str) -> Iterator[str]:
    module = import_module(module_name)
    for name in sorted(module.__all__):
        value, full = getattr(module, name), f"{module_name}.{name}"
        home = getattr(value, "__module__", module_name) or module_name
        if isinstance(value, ModuleType):
            yield f"{full}: module"
        elif inspect.isclass(value):
            yield from _of_class(full, value, whole=module_name.split(".")[0] == home.split(".")[0])
        elif callable(value) and inspect.isroutine(value):
            yield f"{full}{parameters(value)}"
        else:
            yield f"{full}: {type(value).__name__}"


def _of_class(full: str, kind: type, *, whole: bool) -> Iterator[str]:
    """The class; `whole`: also what it has, which for names of a lower package is listed there."""
    bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if _is_said(base))
    yield f"{full}: class({bases})"
    if not whole:
        return
    if not issubclass(kind, Enum) and any(_by_us(kind, each) for each in ("__init__", "__new__")):
        yield f"{full}{parameters(kind)}"
    said = set(_documented(kind))
    for name in sorted({*dir(kind), *said}):
        if name.startswith("_") or not (name in said or _by_us(kind, name)):
            continue
        value = inspect.getattr_static(kind, name, None)
        if isinstance(value, staticmethod | classmethod):
            value = getattr(kind, name)
        if inspect.isfunction(value) or inspect.ismethod(value):
            yield f"{full}.{name}{parameters(value)}"
        else:
            yield f"{full}.{name}"


def _is_said(base: type) -> bool:
    """Whether a base class is a promise: not one that only holds a part of the class's text."""
    builtin = base.__module__ == "builtins" and base is not object
    return builtin or any(
        getattr(import_module(each), base.__name__, None) is base for each in OURS
    )


def _by_us(kind: type, name: str) -> bool:
    owner = next(base for base in kind.__mro__ if name in base.__dict__)
    return owner.__module__.split(".")[0] in OURS


def _documented(kind: type) -> Iterator[str]:
    found = _ATTRIBUTES.search(inspect.getdoc(kind) or "")
    return (each[1] for each in _ATTRIBUTE.finditer(found[1])) if found else iter(())


def parameters(value: Any) -> str:
    """The parameters as callers may give them."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    shown, after_star = [], False
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD and (keys := _keys(value, each.annotation)):
            shown += [*([] if after_star else ["*"]), *(f"{key}=..." for key in keys)]
            continue
        if each.kind is each.KEYWORD_ONLY and not after_star:
            shown.append("*")
        after_star = after_star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        shown.append(_ADDRESS.sub("", str(each.replace(annotation=each.empty))))
    return f"({', '.join(shown)})"


def _keys(function: Any, annotation: Any) -> list[str]:
    """The keys of `**options: Unpack[SomeTypedDict]`, sorted."""
    if isinstance(annotation, str):
        annotation = eval(annotation, inspect.unwrap(function).__globals__)
    kinds = get_args(annotation)
    return sorted(kinds[0].__annotations__) if kinds else []
