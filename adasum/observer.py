"""Observers see every tensor before and after its reduction, for diagnostics.

Adasum by `direct` computes the Gram matrix of all ranks' vectors for each tensor. It gives norms
and angles without another pass over the tensors: a GramObserver receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class ObservedGram(NamedTuple):
    """The dot products of all ranks' vectors of some tensors, and Adasum's coefficients.

    Equal bits on all ranks, on the vectors' device. Ranks that have joined count as zeros.

    Attributes:
        products: float64 [S, n, n], g_i . g_j of each tensor's vectors on ranks i and j, as sent:
            after compression, if any.
        coefficients: float64 [S, n]: the result is the sum of c_i g_i; NaN if a product is not
            finite.
        spread: float64 [S]: how far vectors cancel, the largest (sum of |c_i| |g_i|)^2 / |v|^2 of
            the tree's vectors v = sum of c_i g_i. 1 if all are parallel or zero; inf if vectors
            that are not parallel cancel to zero.
        tree: The joins, with their weights, in the form of `Operands.tree`.
    """

    products: Tensor
    coefficients: Tensor
    spread: Tensor
    tree: Sequence[tuple[int, int, int, int]]

    @property
    def norms(self) -> Tensor:
        """The norms of the ranks' vectors, float64 [S, n]."""
        return self.products.diagonal(dim1=1, dim2=2).sqrt()

    @property
    def result_norms(self) -> Tensor:
        """The norms of the unrounded results, float64 [S], off by some 2^-53 `spread`."""
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
    """An object that is called before and after every reduction.

    Neither method may change the tensors. An observer that calls collectives must be set on all
    ranks.
    """

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """Look at this rank's tensors before they are sent.

        May run in one of autograd's threads during backward, so it must not call collectives.

        Returns:
            Any object; it is passed on to `after_reduction`.
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
    """An observer that receives the Gram matrices of reductions that compute them.

    For such a reduction only `after_gram` is called, and neither of the two other methods.
    """

    def after_gram(self, names: Sequence[str], gram: ObservedGram) -> None:
        """Look at a reduction's Gram matrices, one for each name.

        Called in place of `after_reduction`. Nothing waits for a GPU until a number is read.
        """
        ...


@runtime_checkable
class DifferencesObserver(Observer, Protocol):
    """An observer that is told which kind of tensors it will see; `set_observer` sets it.

    Attributes:
        differences: True for differences of parameters, from each rank's own step; False for
            gradients.
    """

    differences: bool


def require_observer(observer: object) -> None:
    """Raise TypeError unless it is None or has the two methods of an Observer."""
    if not isinstance(observer, Observer | None):
        raise TypeError(
            f"observer must have before_reduction and after_reduction, got "
            f"{type(observer).__name__}"
        )


def observe(
    observer: Observer | None, names: Sequence[str], tensors: Sequence[Tensor], *, by_gram: bool
) -> Callable[[ObservedGram | None], None]:
    """Show tensors to an observer; return a function that shows it the finished reduction.

    by_gram: whether the observer is a GramObserver and this reduction computes Gram matrices.
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
