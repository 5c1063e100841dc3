"""What the source files of a tree import, read without running them.

Imports inside functions and under `TYPE_CHECKING` count like those at a file's top: they, too, are
what one must know to understand the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("kernels", "collectives", "adasum")


def modules_of(root: Path, *packages: str) -> dict[str, Path]:
    """The file of every module under `packages`, by the module's name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    }


def names_imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The dotted name of each thing that a module imports, and the name it has there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.name, alias.asname or first
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: a relative import")
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def graph_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """For each module, those among `modules` that it imports, or imports names from."""
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name, _ in names_imported(ast.parse(path.read_text())):
            found = next((each for each in _prefixes(name) if each in modules), module)
            graph[module] |= {found} - {module}
    return graph


def private_names(tree: ast.AST, packages: tuple[str, ...] = PACKAGES) -> set[str]:
    """The private names of other libraries that a file uses: `torch._C`, `os._exit`."""
    bound = {}
    for name, here in names_imported(tree):
        # `import torch.nn` binds `torch`.
        bound[here] = here if name.startswith(f"{here}.") and "." not in here else name
    used = set(_attribute_chains(tree, bound)) | {name for name, _ in names_imported(tree)}
    return {
        private
        for name in used
        if name.partition(".")[0] not in (*packages, "__future__")
        for private in [_private_part(name)]
        if private
    }


def _attribute_chains(tree: ast.AST, bound: Mapping[str, str]) -> Iterator[str]:
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        parts: list[str] = []
        if node in inner:
            continue
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            yield ".".join([bound[node.id], *reversed(parts)])


def _private_part(name: str) -> str:
    """The name up to the end of its last private part, or nothing where all of it is public."""
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if part.startswith("_") and part[:2] != "__"]
    return ".".join(parts[: private[-1] + 1]) if private else ""


def _prefixes(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]
