"""Statistics of a step's Gram matrices: norms, agreement, orthogonality and noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
# The numbers of a step's layers; 0 is all layers together.
Places: TypeAlias = npt.NDArray[np.intp]
# The first row of every step: the gradients of all layers as one vector.
ALL = "all layers"
# The factor per step in the noise scale's running means: they cover some ten steps.
_KEPT = 0.9


class Row(NamedTuple):
    """The statistics of one layer, or of all layers together, in one step.

    Attributes:
        step: The number of steps that were reduced before.
        name: The layer's name, or "all layers". If some layers have Gram matrices, only those
            count in "all layers".
        norms: The norm of each rank's gradient.
        agreements: The median cosine of each rank's gradient and the others'; NaN if unknown.
        orthogonality: The result's squared norm, divided by the sum of the gradients'.
        noise_scale: The simple noise scale over some ten steps, in units of one rank's batch; inf
            if the mean gradient is lost in noise, NaN if unknown.
    """

    step: int
    name: str
    norms: tuple[float, ...]
    agreements: tuple[float, ...]
    orthogonality: float
    noise_scale: float


def grown(values: npt.NDArray[Any], axis: int, layers: int) -> npt.NDArray[Any]:
    """Return the values, padded with zeros to at least `layers` on an axis."""
    widths = [(0, 0)] * values.ndim
    widths[axis] = 0, max(0, layers - values.shape[axis])
    return np.pad(values, widths) if any(widths[axis]) else values


@dataclass(frozen=True)
class StepGrams:
    """The dot products of a step's gradients: for all layers together, then for each of L layers.

    `products` are g_i . g_j, [1 + L, n, n], NaN off the diagonal if only norms are known;
    `result_squares` are the squared norms of the results, [1 + L].
    """

    step: int
    names: tuple[str, ...]
    products: Floats
    result_squares: Floats

    @classmethod
    def of(
        cls, step: int, names: Sequence[str], products: Floats, squares: Floats, known: Bools
    ) -> StepGrams:
        """Add up the layers whose Gram matrices are `known`, or all layers if none is."""
        chosen = known if known.any() else ~known
        whole, square = products[chosen].sum(0), squares[chosen].sum(0)
        products = np.concatenate([whole[None], products])
        return cls(step, (ALL, *names), products, np.concatenate([square[None], squares]))

    @cached_property
    def norms(self) -> Floats:
        """The ranks' norms, [1 + L, n]."""
        return np.sqrt(self.products.diagonal(axis1=1, axis2=2))

    @cached_property
    def agreements(self) -> Floats:
        """The median cosine of each rank's gradient and the others', [1 + L, n]; NaN if unknown.

        Of two middle values it is the larger, so that one faulty rank of three does not lower the
        other two.
        """
        norms, n = self.norms, self.norms.shape[1]
        if n == 1:
            return np.full_like(norms, np.nan)
        lengths = np.where((norms > 0) & np.isfinite(norms), norms, np.nan)
        cosines = self.products / lengths[:, :, None] / lengths[:, None, :]
        # NaNs are sorted to the end.
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
        """Return estimates of |G|^2 and tr S: G is the true gradient, S a batch's covariance.

        [1 + L] each, unbiased, so that either may be negative; NaN if unknown. Source: McCandlish
        et al., arXiv 1812.06162, appendix A.1; the small batch is one rank's, the big one all
        ranks'.
        """
        n = self.products.shape[1]
        small = np.square(self.norms).mean(1)
        big = self.products.sum((1, 2)) / n**2
        others = n - 1 or np.nan
        return (n * big - small) / others, (small - big) * n / others

    def rows(self, noise_scales: Floats) -> list[Row]:
        """Return one row per name."""
        columns = (self.norms, self.agreements, self.orthogonality, noise_scales)
        rows = zip(self.names, *(each.tolist() for each in columns), strict=True)
        return [Row(self.step, name, tuple(a), tuple(b), *rest) for name, a, b, *rest in rows]


class NoiseScale:
    """tr S / |G|^2 of every layer, a ratio of means: |G|^2 of one step is often negative."""

    def __init__(self) -> None:
        self._means = np.zeros((2, 0))

    def add(self, places: Places, estimates: tuple[Floats, Floats]) -> Floats:
        """Add the estimates of the layers at `places`; return their scales, NaN if unknown."""
        self._means = grown(self._means, 1, int(places.max()) + 1)
        news, old = np.array(estimates), self._means[:, places]
        means = np.where(np.isfinite(news), _KEPT * old + (1 - _KEPT) * news, old)
        self._means[:, places] = signal, noise = means
        scales = np.divide(noise, signal, np.full_like(noise, np.inf), where=signal > 0)
        return np.where(np.isfinite(news).all(0), scales, np.nan)
