"""Write the names that torch.cuda has in the oldest torch of a GPU machine, from its wheel.

pip download --no-deps torch==2.11.0 -d FOLDER
python -m tests.pretended_gpu.record FOLDER/torch-2.11.0*.whl
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator

from tests.pretended_gpu.torch_cuda import NAMES

_FOLDER = "torch/cuda/"


def names(wheel: zipfile.ZipFile, module: str = "__init__") -> Iterator[str]:
    """Yield the public names of a module of torch.cuda, as far as its text tells."""
    for node in ast.walk(ast.parse(wheel.read(f"{_FOLDER}{module}.py"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name != "*":
                    yield (alias.asname or alias.name).partition(".")[0]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield from names(wheel, node.module)


def main(path: str) -> None:
    with zipfile.ZipFile(path) as wheel:
        modules = {
            each.removeprefix(_FOLDER).partition("/")[0].removesuffix(".py")
            for each in wheel.namelist()
            if each.startswith(_FOLDER) and each.endswith(".py")
        }
        found = {one for one in {*names(wheel), *modules} if not one.startswith("_")}
    NAMES.write_text("\n".join(sorted(found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
