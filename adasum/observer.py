"""Observers see every tensor before and after its reduction, for diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Observer(Protocol):
    """Is called before and after every reduction.

    Neither call may change the tensors. An observer whose calls are collectives must be set on all
    ranks.
    """

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """Look at this rank's tensors before they are sent.

        May be called in one of autograd's threads while backward runs, so it must not call
        collectives.

        Returns:
            A token, which is handed to `after_reduction`.
        """
        ...

    def after_reduction(self, token: Any, tensors: Sequence[Tensor]) -> None:
        """Look at the same tensors, which now hold the result.

        Called in the thread that waits for the reduction, in one order on every rank, so it may
        call collectives.
        """
        ...


def require_observer(observer: object) -> None:
    """Raise TypeError for what is neither None nor has the two methods of an Observer."""
    if not isinstance(observer, Observer | None):
        raise TypeError(
            f"observer must have before_reduction and after_reduction, not {type(observer)}"
        )
