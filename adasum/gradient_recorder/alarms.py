"""Alarms that name a faulty rank, and the tests that raise them (see docs/gradient-recorder.md).

*Comparisons* of one rank with the others are never sure in one step, since batches differ. They
test for an event, such as "the longest of n and `factor` times the others' median", and `Evidence`
accumulates the events, for all layers together and for each layer, with at most 1e-8 false alarms
per step. Norms must differ by `factor`, and agreements in direction by a factor of 4, because ranks
have different data, and smaller differences are no fault. Differences of parameters depend on
earlier batches too: then only all layers together are compared, and 19 steps count as one, as for a
momentum of 0.9.

*Identities* do not happen by chance. They are: the gradient of all layers equals another rank's,
|g_i - g_j| <= 2^-12 sqrt(|g_i| |g_j|) (if only norms are known: equal to 1e-9), five times in
succession; or its norm stays the same to 1e-9 for five steps, while the norms of others change.

*Numbers that are not finite* end a training run in one step. If at most half of the ranks have
them, these ranks are "wild" at once. If more have them, a rank whose gradient was too long before
is "scaled", with evidence of 1000 only, since a run is lost at most once.

With two ranks a comparison does not tell which one is faulty, unless its norm is zero or not
finite: the alarm names both. There is no alarm for directions, since the cosine is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from adasum.gradient_recorder.statistics import ALL, Bools, Floats, Places, StepGrams, grown

# The most false alarms per step, in all tests together, if ranks draw their batches alike.
FALSE_ALARMS = 1e-8
_BETS = (0.2, 0.5, 0.9)
Kind = Literal["scaled", "zero", "wild", "flipped", "duplicated", "stuck"]
_TEXTS: dict[Kind, str] = {
    "scaled": "has {:.3g} times the norm of the others'",
    "zero": "is zero, with {:g} times the norm of the others'",
    "wild": "points elsewhere than the others', with a cosine of {:.3g}",
    "flipped": "is opposed to the others', with a cosine of {:.3g}",
    "duplicated": "is the same, at a relative distance of {:.2g}",
    "stuck": "does not change, with a norm of {:.9g}",
}
IN_A_ROW = 5
# The number of layers that alarm texts name.
_SHOWN = 3
# Gradients within these relative distances are the same; the second if only norms are known.
_SAME, _SAME_NORM = 2.0**-12, 1e-9
# A direction is another one if its agreement is below this part of the others' agreement.
_MARGIN = 0.25
# The number of correlated steps that count as one, for a momentum of 0.9: (1 + 0.9)/(1 - 0.9).
_DIFFERENCES_WORTH = 19.0
# The lower threshold of evidence for a direction after an alarm for a norm, and for a norm once the
# run is lost.
_ENOUGH = 1000.0
_LONG, _SHORT, _UNLIKE = range(3)
# The decay per step of the running fractions of steps with a zero or an opposed gradient.
_KEPT = 0.9


class Alarm(NamedTuple):
    """The report that one rank is faulty, or one of several.

    Attributes:
        step: The step that made the evidence sufficient.
        kind: "scaled", "zero", "wild" (another direction, or not finite), "flipped" (the opposed
            direction), "duplicated" or "stuck" (the same gradient every step).
        ranks: The faulty rank; all ranks with the same gradient; or both of two ranks.
        names: ("all layers",), or the layers that show the fault.
        value: The number that the text shows, of the first name and rank; NaN if not finite.
    """

    step: int
    kind: Kind
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    value: float

    def __str__(self) -> str:
        several = len(self.ranks) > 1
        who = f"rank{'s' * several} {' and '.join(map(str, self.ranks))}"
        what = "is not finite" if np.isnan(self.value) else _TEXTS[self.kind].format(self.value)
        if self.kind == "scaled" and several:
            who, what = "rank 0", f"{what}, rank 1, and two ranks do not tell which is at fault"
        more = f" and {len(self.names) - _SHOWN} more" * (len(self.names) > _SHOWN)
        shown = ", ".join(self.names[:_SHOWN]) + more
        return f"step {self.step}, {shown}: the gradient of {who} {what}"


def suspects(ranks: int) -> int:
    """Return m, the number of ranks that may have the same fault and still be found."""
    return max(1, ranks // 4)


class Evidence:
    """The statistics of some tests of every layer and rank, with a bound on false alarms.

    If ranks draw their batches alike, each is equally likely to have the longest gradient: "among
    the m longest of n" has probability p = m/n, and an event with more conditions at most that. We
    bet a part b of the stake on the event: each step multiplies the stake by 1 - b + b/p if it
    happens, otherwise by 1 - b, on average by 1 or less. The Shiryaev-Roberts statistic adds up
    such games begun at every step, R <- (1 + R)(1 - b + b e/p): the probability that it ever
    reaches A within T steps without a fault is at most T/A. Several bets are averaged. If w steps
    count as one, each factor is raised to the power 1/w. Source: "E-detectors", arXiv 2203.03532.

    `fired`, bool [tests, layers, ranks], is set when the evidence reaches the threshold, and
    cleared when it falls below the threshold's root.
    """

    def __init__(self, tests: int, ranks: int, worth: float = 1.0) -> None:
        bets = np.array(_BETS)[:, None, None, None]
        self._miss = (1 - bets) ** (1 / worth)
        self._hit = (1 - bets + bets * ranks / suspects(ranks)) ** (1 / worth)
        self._value = np.zeros((len(_BETS), tests, 0, ranks))
        self.fired: Bools = np.zeros((tests, 0, ranks), dtype=np.bool_)

    @property
    def threshold(self) -> float:
        """The evidence for an alarm; it grows with the number of tests, layers and ranks."""
        return self.fired.size / FALSE_ALARMS

    def grow(self, layers: int) -> None:
        """Extend the tables to at least this number of layers."""
        self._value, self.fired = grown(self._value, 2, layers), grown(self.fired, 1, layers)

    def add(self, places: Places, events: Bools) -> Floats:
        """Add a step's events, bool [tests, its layers, ranks]; return these layers' evidence."""
        # One bet may reach the threshold by itself; more evidence would take long to decay.
        most = len(_BETS) * self.threshold
        value = (1 + self._value[:, :, places]) * np.where(events, self._hit, self._miss)
        self._value[:, :, places] = value = np.minimum(value, most)
        mean: Floats = value.mean(0)
        holds = self.fired[:, places] & (mean >= self.threshold**0.5)
        self.fired[:, places] = (mean >= self.threshold) | holds
        return mean


class Watch:
    """Finds faulty ranks, step by step; arguments as in `GradientRecorder`."""

    def __init__(self, ranks: int, factor: float, *, differences: bool = False) -> None:
        self._ranks, self._factor = ranks, factor
        self._others = np.array([[j for j in range(ranks) if j != i] for i in range(ranks)])
        self._layers = 1 if differences else None
        self._evidence = Evidence(3, ranks, _DIFFERENCES_WORTH if differences else 1.0)
        self._shares = np.zeros((2, 0, ranks))
        self._same = np.zeros((ranks, ranks), dtype=np.int64)
        self._stuck = np.zeros(ranks, dtype=np.int64)
        self._last: tuple[tuple[str, ...], Floats] = (), np.zeros(ranks)
        # Alarms that were raised and still hold: comparisons by layer and ranks, and identities.
        self._said: dict[tuple[int, tuple[int, ...]], set[Kind]] = {}
        self._identical: set[tuple[Kind, tuple[int, ...]]] = set()
        # Ranks that were too long in the last step with finite gradients, and their ratios.
        self._long: dict[tuple[int, ...], float] = {}

    def add(self, places: Places, grams: StepGrams) -> list[Alarm]:
        """Add a step; return new alarms. `places` are its rows' layer numbers, 0 for ALL."""
        if self._ranks == 1:
            return []
        with np.errstate(all="ignore"):
            news = [*self._identities(grams)]
            # Ranks with the same gradient agree with each other, which makes comparisons unfair.
            if all(kind != "duplicated" for kind, _ in self._identical):
                news += self._comparisons(places, grams)
            return news

    def _identities(self, grams: StepGrams) -> Iterator[Alarm]:
        products, norms = grams.products[0], grams.norms[0]
        found: dict[tuple[Kind, tuple[int, ...]], float] = {}
        finite = np.isfinite(grams.norms).all(0)
        if 2 * finite.sum() >= self._ranks:
            found = {("wild", (rank,)): np.nan for rank in np.flatnonzero(~finite).tolist()}
        else:
            found = {("scaled", r): to for r, to in self._long.items() if (0, r) not in self._said}
        usable = finite & (norms > 0)
        squares = products.diagonal()
        apart = np.maximum(squares[:, None] + squares - 2 * products, 0.0)
        distances = np.sqrt(apart / (norms[:, None] * norms))
        by_norm = np.abs(norms[:, None] - norms) / norms
        same = np.where(np.isnan(products), by_norm <= _SAME_NORM, distances <= _SAME)
        distances = np.where(np.isnan(products), by_norm, distances)
        np.fill_diagonal(same, False)
        self._same = np.where(same & usable, self._same + 1, 0)

        (names, last), self._last = self._last, (grams.names, norms)
        still = usable & (np.abs(norms - last) <= _SAME_NORM * norms) & (names == grams.names)
        # If most norms stay the same, as at a learning rate of zero, no rank is at fault.
        still &= 2 * (usable & ~still).sum() >= self._ranks
        self._stuck = np.where(still, self._stuck + 1, 0)

        for i in np.flatnonzero(self._stuck >= IN_A_ROW).tolist():
            found["stuck", (i,)] = norms[i]
        for i in np.flatnonzero((self._same >= IN_A_ROW).any(1)).tolist():
            equal = [i, *np.flatnonzero(self._same[i] >= IN_A_ROW).tolist()]
            if i == min(equal):
                found["duplicated", tuple(equal)] = distances[i, equal[1:]].max()
        for kind, ranks in sorted(found.keys() - self._identical):
            yield Alarm(grams.step, kind, ranks, (ALL,), float(found[kind, ranks]))
        self._identical = set(found)

    def _comparisons(self, places: Places, grams: StepGrams) -> Iterator[Alarm]:
        places = places[: self._layers]
        norms = np.where(np.isnan(grams.norms), np.inf, grams.norms)[: len(places)]
        agreements = np.where(np.isnan(grams.agreements), np.inf, grams.agreements)[: len(places)]
        # The sorted values of the others. Of two middle ones, the one nearer to this rank's value
        # counts: if one of two others is faulty, this rank must not look faulty.
        others = np.sort(np.array([norms, agreements])[:, :, self._others], axis=3)
        middle = self._ranks - 1
        low, usual = others[..., (middle - 1) // 2]
        high = others[0, ..., middle // 2]
        # The number of others that are as far out, or further; ties count against an event.
        sides = np.array([norms, -norms, -agreements])
        further = (sides[..., None, :] >= sides[..., None]).sum(3) - 1
        comparable = (usual > 0) & np.isfinite(usual) & (self._ranks > 2)
        margin = np.where(comparable, _MARGIN * usual, np.nan)
        outside = [norms > self._factor * high, norms * self._factor < low, agreements < margin]
        events = (further < suspects(self._ranks)) & np.array(outside)
        layers = int(places.max()) + 1
        self._evidence.grow(layers)
        self._shares = grown(self._shares, 1, layers)
        evidence = self._evidence.add(places, events)
        now = np.array([norms == 0, agreements < -margin])
        self._shares[:, places] = _KEPT * self._shares[:, places] + (1 - _KEPT) * now
        ratios = norms / np.where(norms > low, high, low)
        if np.isfinite(grams.norms[0]).all():
            enough = np.flatnonzero(events[_LONG, 0] & (evidence[_LONG, 0] >= _ENOUGH)).tolist()
            named = [(i,) if self._ranks > 2 else (0, 1) for i in enough]
            self._long = {ranks: ratios[0, ranks[0]] for ranks in named}
        if self._said or self._evidence.fired.any():
            yield from self._say(places, grams, evidence[_UNLIKE] >= _ENOUGH, ratios)

    def _say(
        self, places: Places, grams: StepGrams, unlike: Bools, ratios: Floats
    ) -> Iterator[Alarm]:
        """Yield the new alarms of comparisons, one for each kind and ranks."""
        layers = places.tolist()
        held: dict[tuple[int, tuple[int, ...]], set[Kind]] = {}
        for row, rank in np.argwhere(self._evidence.fired[:, places].any(0)).tolist():
            broken = not np.isfinite(grams.norms[row, rank])
            kinds = self._kinds(layers[row], rank, broken or bool(unlike[row, rank]))
            if self._ranks == 2 and "scaled" in kinds:
                kinds.remove("scaled")
                # A norm of zero, or not finite, tells which of the two ranks is faulty.
                normal = np.isfinite(ratios[row]).all() and ratios[row].all()
                if normal or (layers[row], (0, 1)) in self._said:
                    held.setdefault((row, (0, 1)), set()).add("scaled")
            held[row, (rank,)] = kinds
        before, self._said = self._said, {k: v for k, v in self._said.items() if k[0] not in layers}
        news: dict[tuple[Kind, tuple[int, ...]], list[int]] = {}
        for (row, ranks), kinds in held.items():
            said = before.get((layers[row], ranks), set())
            if kinds:
                self._said[layers[row], ranks] = said | kinds
            # After an alarm for the direction, or for all layers, no further ones follow.
            if said - {"scaled"} or (row and (0, ranks) in self._said):
                continue
            for kind in kinds - said:
                news.setdefault((kind, ranks), []).append(row)
        for (kind, ranks), rows in news.items():
            if (kind, ranks) in self._identical:
                continue
            values = grams.agreements if kind in ("wild", "flipped") else ratios
            names = tuple(grams.names[row] for row in rows)
            yield Alarm(grams.step, kind, ranks, names, float(values[rows[0], ranks[0]]))

    def _kinds(self, place: int, rank: int, unlike: bool) -> set[Kind]:
        """Return the kinds of alarm for one rank and layer, by the tests that have fired."""
        fired, (zero, opposed) = self._evidence.fired[:, place, rank], self._shares[:, place, rank]
        direction: Kind = "flipped" if opposed >= 0.5 else "wild"
        found: set[Kind] = {direction} if fired[_UNLIKE] else set()
        if fired[_LONG]:
            found.add(direction if unlike else "scaled")
        if fired[_SHORT]:
            found.add("zero" if zero >= 0.5 else "scaled")
        return found
