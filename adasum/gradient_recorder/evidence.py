"""Evidence that ranks are not alike, added up over steps with a bound on false alarms.

Where ranks draw their batches alike, their gradients of a step are exchangeable given the past:
which rank has the longest one is a fair draw. So an event such as "this rank's is among the m
longest of n" has a probability of at most m/n, whatever the gradients' distribution, and so has
any event that asks for more. Against that chance p one bets a part b of what one has: a step
multiplies it by 1 - b + b/p if the event comes, else by 1 - b, which is 1 or less on average. The
Shiryaev-Roberts statistic adds up such games begun at every step, R <- (1 + R)(1 - b + b e/p),
so that a fault that begins late is found as soon as an early one. Its mean after T steps of no
fault is at most T, and the probability that it ever reaches A until then at most T/A. Several bets
are averaged: small ones find what is often so, large ones soon find what always is.

Where what a rank sends remembers its own past, as the differences of a momentum do, an event is
often followed by another one, and the next step says little. If w such steps are worth one, each
step's factor is raised to the power 1/w, which leaves the mean at 1 or less.

Source: Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change
detection", arXiv 2203.03532.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
# Where a step's layers are among all: all of them mostly, which is a slice, and then not copied.
Places: TypeAlias = slice | npt.NDArray[np.intp]

# The most false alarms a step, of all tests together, where ranks' batches are drawn alike.
FALSE_ALARMS = 1e-8
_BETS = (0.2, 0.5, 0.9)


def suspects(ranks: int) -> int:
    """Return m: how many of the ranks may be faulty in the same way and still be found."""
    return max(1, ranks // 4)


def layers_up_to(places: Places) -> int:
    """Return how many layers there are at least."""
    return int(places.stop if isinstance(places, slice) else places.max() + 1)


class Evidence:
    """The statistics of some tests of every layer and rank.

    Args:
        tests: How many.
        ranks: How many ranks each step compares.
        worth: How many steps are worth one, at least 1.

    Attributes:
        fired: bool [tests, layers, ranks]: what has reached the threshold, until it is below
            its square root.
    """

    def __init__(self, tests: int, ranks: int, worth: float = 1.0) -> None:
        bets = np.array(_BETS)[:, None, None, None]
        self._miss = (1 - bets) ** (1 / worth)
        self._hit = (1 - bets + bets * ranks / suspects(ranks)) ** (1 / worth)
        self._value = np.zeros((len(_BETS), tests, 0, ranks))
        self.fired: Bools = np.zeros((tests, 0, ranks), dtype=np.bool_)

    @property
    def threshold(self) -> float:
        """How much evidence is an alarm: grows with the number of tests, layers and ranks."""
        return self.fired.size / FALSE_ALARMS

    def grow(self, layers: int) -> None:
        """Have at least so many layers."""
        missing = layers - self.fired.shape[1]
        if missing > 0:
            width = [(0, 0), (0, 0), (0, missing), (0, 0)]
            self._value = np.pad(self._value, width)
            self.fired = np.pad(self.fired, width[1:])

    def add(self, places: Places, events: Bools) -> Floats:
        """Add a step's events, bool [tests, layers of this step, ranks].

        Returns:
            The evidence of these layers, float64 of the events' shape.
        """
        # One bet alone may reach the threshold; what is beyond would take long to be forgotten.
        most = len(_BETS) * self.threshold
        value = (1 + self._value[:, :, places]) * np.where(events, self._hit, self._miss)
        np.minimum(value, most, out=value)
        self._value[:, :, places] = value
        mean = value.mean(0)
        reached = mean >= self.threshold
        holds = self.fired[:, places] & (mean >= self.threshold**0.5)
        self.fired[:, places] = reached | holds
        return mean
