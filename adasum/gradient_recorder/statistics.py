"""What a step's Gram matrices say: norms, agreement, orthogonality and the noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adasum.gradient_recorder.evidence import Bools, Floats, Places, layers_up_to

# The first row of every step: the gradients of all layers as one vector.
ALL = "all layers"
# What a step leaves of the noise scale's running means, which so have the last ten steps or so.
_KEPT = 0.9


@dataclass(frozen=True)
class StepGrams:
    """The dot products of a step's gradients: of all layers together, then of each of L layers.

    Attributes:
        step: Its number.
        names: ALL, and the layers'.
        products: float64 [1 + L, n, n], g_i . g_j; NaN beside the diagonal of mere norms.
        result_squares: float64 [1 + L], the squared norms of the results.
    """

    step: int
    names: tuple[str, ...]
    products: Floats
    result_squares: Floats

    @classmethod
    def of(
        cls, step: int, names: Sequence[str], products: Floats, squares: Floats, known: Bools
    ) -> StepGrams:
        """Add up the layers: those of which more than norms is `known`, else all."""
        chosen = known if known.any() else ~known
        whole, square = products[chosen].sum(0), squares[chosen].sum(0)
        return cls(
            step,
            (ALL, *names),
            np.concatenate([whole[None], products]),
            np.concatenate([square[None], squares]),
        )

    def of_all_layers(self) -> StepGrams:
        """Return the first row alone."""
        return StepGrams(self.step, self.names[:1], self.products[:1], self.result_squares[:1])

    @cached_property
    def norms(self) -> Floats:
        """The ranks' norms, [1 + L, n]."""
        return np.sqrt(self.products.diagonal(axis1=1, axis2=2))

    @cached_property
    def agreements(self) -> Floats:
        """The median cosine of each rank's gradient and the others', [1 + L, n].

        Of an even number the larger of the middle ones, so that with three ranks a faulty one does
        not decide for the other two. NaN where either is zero, not finite or unknown.
        """
        norms, n = self.norms, self.norms.shape[1]
        usable = (norms > 0) & np.isfinite(norms)
        lengths = np.where(usable, norms, np.nan)
        cosines = self.products / lengths[:, :, None] / lengths[:, None, :]
        if n == 1:
            return np.full_like(norms, np.nan)
        # NaN are the last ones in order.
        ordered = np.sort(cosines[:, ~np.eye(n, dtype=np.bool_)].reshape(-1, n, n - 1), axis=2)
        middle = np.minimum((~np.isnan(ordered)).sum(2) // 2, n - 2)
        found: Floats = np.take_along_axis(ordered, middle[:, :, None], axis=2)[:, :, 0]
        return found

    @cached_property
    def orthogonality(self) -> Floats:
        """|result|^2 / sum of |g_i|^2, [1 + L]; NaN of zeros."""
        total = np.square(self.norms).sum(1)
        return np.divide(self.result_squares, total, np.full_like(total, np.nan), where=total > 0)

    def noise(self) -> tuple[Floats, Floats]:
        """Return estimates of |G|^2 and tr S, of the true gradient and a batch's covariance.

        [1 + L] each, unbiased where batches are drawn independently, so that either may be
        negative; NaN where products are unknown or there is one rank. Source: McCandlish et al.,
        arXiv 1812.06162, appendix A.1, with a rank's batch as the small one and all as the big one.
        """
        n = self.products.shape[1]
        if n == 1:
            return np.full((2, len(self.names)), np.nan)[0], np.full(len(self.names), np.nan)
        small = np.square(self.norms).mean(1)
        big = self.products.sum((1, 2)) / n**2
        return (n * big - small) / (n - 1), (small - big) * n / (n - 1)


class NoiseScale:
    """tr S / |G|^2 of every layer, in batches of a rank, each a mean over the last steps.

    The quotient of means, since single steps' estimates of |G|^2 are often negative; inf where
    even their mean is.
    """

    def __init__(self) -> None:
        self._means = np.zeros((2, 0))

    def add(self, places: Places, estimates: tuple[Floats, Floats]) -> Floats:
        """Take the estimates of the layers at `places`; return their scales, NaN if unknown."""
        missing = layers_up_to(places) - self._means.shape[1]
        if missing > 0:
            self._means = np.pad(self._means, [(0, 0), (0, missing)])
        news = np.array(estimates)
        old = self._means[:, places]
        means = np.where(np.isfinite(news), _KEPT * old + (1 - _KEPT) * news, old)
        self._means[:, places] = means
        signal, noise = means
        scales = np.divide(noise, signal, np.full_like(noise, np.inf), where=signal > 0)
        return np.where(np.isfinite(news).all(0), scales, np.nan)
