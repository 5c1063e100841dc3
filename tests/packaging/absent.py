"""Play a machine that lacks optional parts: `absent.hide(...)` before anything imports torch."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# What a torch built with USE_DISTRIBUTED=0 has not; `torch.distributed` asks for the first of them.
_C10D = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")


class _Hider(importlib.abc.MetaPathFinder):
    """Finds nothing itself, and keeps the finders behind it from finding what is hidden."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname == "torch.distributed" and fullname in self._names:
            for name in _C10D:
                vars(sys.modules["torch._C"]).pop(name, None)
        return None


def hide(*names: str) -> None:
    """Have `import` not find these packages, and torch be without "torch.distributed" if named."""
    sys.meta_path.insert(0, _Hider(names))
