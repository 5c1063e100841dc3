"""Looking at what a reduction does to each tensor, for diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Watcher"]


class Watcher(Protocol):
    """Sees the tensors of every reduction before they travel and after.

    Both calls must leave the tensors as they are. All ranks watch or none does, where a watcher
    calls collectives itself.
    """

    def sent(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """This rank's own tensors, about to travel; what is returned, `reduced` is given.

        May be called in one of autograd's threads, while backward runs; no collectives here.
        """
        ...

    def reduced(self, token: Any, tensors: Sequence[Tensor]) -> None:
        """The same tensors, now holding the answer; in the thread that waits for it.

        In one order on every rank: Sum, Average and the gradient method wait for all buckets first.
        """
        ...
