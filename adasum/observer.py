"""Observers see every tensor before and after its reduction, for diagnostics.

Adasum by `direct` makes the Gram matrix of all ranks' vectors of each tensor, from which norms and
angles follow without another look at a tensor: a GramObserver takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class ObservedGram(NamedTuple):
    """The dot products of all ranks' vectors of some tensors, and what Adasum made of them.

    Equal bits on all ranks, on the vectors' device. A rank that has joined has zeros.

    Attributes:
        products: float64 [S, n, n], g_i . g_j of each tensor's vectors on ranks i and j, as sent:
            compressed, where they are.
        coefficients: float64 [S, n]: the result is the sum of c_i g_i; NaN of what is not finite.
        spread: float64 [S]: how far vectors cancel, the largest (sum of |c_i| |g_i|)^2 / |v|^2 of
            the tree's vectors v = sum of c_i g_i. 1 where all are parallel or zero, inf where
            others leave nothing.
        tree: The joins that made them, with their weights, as `Operands.tree` has them.
    """

    products: Tensor
    coefficients: Tensor
    spread: Tensor
    tree: Sequence[tuple[int, int, int, int]]

    @property
    def norms(self) -> Tensor:
        """The vectors' norms, float64 [S, n]."""
        return self.products.diagonal(dim1=1, dim2=2).sqrt()

    @property
    def result_norms(self) -> Tensor:
        """The results' norms before they are rounded, float64 [S], off by some 2^-53 `spread`."""
        return squared_norms_by(self.products, self.coefficients).sqrt()


def squared_norms_by(products: Tensor, coefficients: Tensor) -> Tensor:
    """Return |sum of c_i g_i|^2, float64 [S], off by some 2^-53 (sum of |c_i| |g_i|)^2.

    Args:
        products: float64 [S, n, n], g_i . g_j.
        coefficients: float64 [S, n].
    """
    terms = coefficients.unsqueeze(2) * products * coefficients.unsqueeze(1)
    return terms.sum((1, 2)).clamp(min=0.0)


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


@runtime_checkable
class GramObserver(Observer, Protocol):
    """An observer that is given Gram matrices where a reduction makes them.

    That is known before: of such a reduction it gets one call, in the place of the two others.
    """

    def after_gram(self, names: Sequence[str], gram: ObservedGram) -> None:
        """Look at a reduction's Gram matrices, one for each name.

        Called where `after_reduction` would be. Nothing waits for a GPU until it reads a number.
        """
        ...


@runtime_checkable
class DifferencesObserver(Observer, Protocol):
    """An observer that is told, by `set_observer`, what it sees.

    Attributes:
        differences: Whether it is shown differences of parameters, which the ranks' own steps made,
            and not gradients.
    """

    differences: bool


def require_observer(observer: object) -> None:
    """Raise TypeError for what is neither None nor has the two methods of an Observer."""
    if not isinstance(observer, Observer | None):
        raise TypeError(
            f"observer must have before_reduction and after_reduction, not {type(observer)}"
        )


def observe(
    observer: Observer | None, names: Sequence[str], tensors: Sequence[Tensor], *, by_gram: bool
) -> Callable[[ObservedGram | None], None]:
    """Show tensors to an observer before they are reduced; return what shows it the reduction.

    by_gram: whether the observer is a GramObserver, and this reduction makes Gram matrices.
    """
    if observer is None:
        return lambda _: None
    if by_gram:

        def show(gram: ObservedGram | None) -> None:
            assert isinstance(observer, GramObserver)
            assert gram is not None
            observer.after_gram(names, gram)

        return show
    token = observer.before_reduction(names, tensors)
    return lambda _: observer.after_reduction(token, tensors)
