"""Hide packages from `import`, so that a test sees a machine without them.

`hide(...)` must run before anything imports torch.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# What a torch built with USE_DISTRIBUTED=0 lacks; `torch.distributed` asks for the first of them.
_DISTRIBUTED = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")


class _Finder(importlib.abc.MetaPathFinder):
    """Raises for the hidden names and leaves all others to the finders after it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname == "torch.distributed" and fullname in self._names:
            for name in _DISTRIBUTED:
                vars(sys.modules["torch._C"]).pop(name, None)
        return None


def hide(*names: str) -> None:
    """Make imports of these packages fail.

    Args:
        names: Top-level packages, or "torch.distributed" for a torch that is built without it.
    """
    sys.meta_path.insert(0, _Finder(names))
