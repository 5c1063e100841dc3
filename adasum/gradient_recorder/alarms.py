"""Which rank is faulty: alarms, each with its statistic, its chance without a fault, its threshold.

Two kinds of tests. *Comparisons* of a rank with the others are never sure in one step: batches
differ. They ask for an event whose chance is at most m/n where all ranks draw their batches alike
(m = n // 4, at least 1), and add up evidence (`evidence.py`), over all layers together and for each
layer. There are at most 1e-8 false alarms a step, of all tests, layers and ranks together.

- The norm is among the m longest, and above `factor` times the median of the others'; or among
  the m shortest, and below that part of it: "scaled", or "zero".
- The agreement, the median cosine with the others, is among the m least, and less than a quarter of
  the others' median, where that is positive: "wild", or "flipped" where it is mostly below minus a
  quarter. A rank whose norm is too long is "wild" rather than "scaled" where there is evidence for
  this, or where its norm is not finite.

`factor` and the quarter are margins: ranks whose data differ, by language or length, are not alike,
and less than that is no fault. They make the events rarer, and the bound stays.

Of *differences*, which Adasum's delta method and local steps reduce, neither holds: each rank's
optimizer remembers its own batches. Then all layers together are compared alone, and 19 steps are
worth one, as of a momentum of 0.9: a fault that each of 18 gradients shows takes 350 steps.

*Identities* do not happen by chance. The gradient of all layers together

- is another rank's, |g_i - g_j| <= 2^-12 sqrt(|g_i| |g_j|): "duplicated". Independent batches come
  as near only if one is some 10^7 times the noise scale. Where norms alone are known, they must be
  equal to 1e-9, which needs deterministic gradients.
- has the norm of the step before to 1e-9, while another rank's changed: "stuck".

five times in a row: gradients of few bits may agree by chance, but not so often.

With two ranks a comparison cannot tell which one is faulty, unless its norm is zero or not finite:
it names both, and says nothing of directions, since both agree alike. Three ranks are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from adasum.gradient_recorder.evidence import (
    Bools,
    Evidence,
    Floats,
    Places,
    layers_up_to,
    suspects,
)
from adasum.gradient_recorder.statistics import ALL, StepGrams

Kind = Literal["scaled", "zero", "wild", "flipped", "duplicated", "stuck"]
IN_A_ROW = 5
# How many layers a message names.
_SHOWN = 3
# Relative distances of gradients that are the same: where angles are known, and by norms alone.
_SAME, _SAME_NORM = 2.0**-12, 1e-9
# The part of the others' agreement below which a direction is another one.
_MARGIN = 0.25
# Of a momentum of 0.9, the correlation of successive steps: (1 + 0.9)/(1 - 0.9).
_DIFFERENCES_WORTH = 19.0
# Evidence that a direction is not the others', once the norm is known not to be.
_ENOUGH = 1000.0
_LONG, _SHORT, _UNLIKE = range(3)
# What a step leaves of the running shares of steps with a zero, and with an opposed gradient.
_KEPT = 0.9


class Alarm(NamedTuple):
    """A rank is faulty, or one of two is.

    Attributes:
        step: Where enough steps had shown it.
        kind: "scaled", "zero", "wild" (another direction, or not finite), "flipped" (the opposed
            direction), "duplicated" or "stuck" (the same gradient every step).
        ranks: The faulty one; those that have the same gradient; or both ranks of two.
        names: ("all layers",), or the layers that show it.
        value: In this step, of the first name and rank: of "scaled" and "zero" the norm divided by
            the median of the others', of "wild" and "flipped" the agreement, NaN if not finite, of
            "duplicated" the relative distance, of "stuck" the norm.
    """

    step: int
    kind: Kind
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    value: float

    def __str__(self) -> str:
        what = {
            "scaled": "has {:.3g} times the norm of the others'",
            "zero": "is zero, with {:g} times the norm of the others'",
            "wild": "points elsewhere than the others', with a cosine of {:.3g}",
            "flipped": "is opposed to the others', with a cosine of {:.3g}",
            "duplicated": "is the same, at a relative distance of {:.2g}",
            "stuck": "does not change, with a norm of {:.9g}",
        }[self.kind].format(self.value)
        who = f"ranks {' and '.join(map(str, self.ranks))}"
        if len(self.ranks) == 1:
            who = who.replace("ranks", "rank")
        elif self.kind == "scaled":
            who, what = "rank 0", f"{what}, rank 1, and two ranks do not tell which is at fault"
        shown = ", ".join(self.names[:_SHOWN])
        if len(self.names) > _SHOWN:
            shown += f" and {len(self.names) - _SHOWN} more"
        return f"step {self.step}, {shown}: the gradient of {who} {what}"


class Watch:
    """Finds faulty ranks among n, step by step.

    Args:
        ranks: n.
        factor: From which factor on a norm is another one, above 1.
        differences: Whether these are differences of parameters, made by optimizers with memories.
    """

    def __init__(self, ranks: int, factor: float, *, differences: bool = False) -> None:
        self._ranks, self._factor = ranks, factor
        self._others = np.array([[j for j in range(ranks) if j != i] for i in range(ranks)])
        self._differences = differences
        self._evidence = Evidence(3, ranks, _DIFFERENCES_WORTH if differences else 1.0)
        self._shares = np.zeros((2, 0, ranks))
        self._same = np.zeros((ranks, ranks), dtype=np.int64)
        self._stuck = np.zeros(ranks, dtype=np.int64)
        self._last: tuple[tuple[str, ...], Floats] = (), np.zeros(ranks)
        # What holds and was said: of comparisons by layer and ranks, and of identities.
        self._said: dict[tuple[int, tuple[int, ...]], set[Kind]] = {}
        self._identical: set[tuple[Kind, tuple[int, ...]]] = set()

    def add(self, places: Places, grams: StepGrams) -> list[Alarm]:
        """Take a step whose rows have these places among all layers, 0 for ALL; return the news."""
        if self._ranks == 1:
            return []
        with np.errstate(all="ignore"):
            news = [*self._identities(grams)]
            # Ranks of which some have the same gradient are not alike: those agree with each other.
            if all(kind != "duplicated" for kind, _ in self._identical):
                if self._differences:
                    places, grams = slice(0, 1), grams.of_all_layers()
                news += self._comparisons(places, grams)
            return news

    def _identities(self, grams: StepGrams) -> Iterator[Alarm]:
        products, norms = grams.products[0], grams.norms[0]
        usable = np.isfinite(norms) & (norms > 0)
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
        # Where nothing moves, as at a rate of zero on the same data, no rank is at fault.
        still &= 2 * (usable & ~still).sum() >= self._ranks
        self._stuck = np.where(still, self._stuck + 1, 0)

        found: dict[tuple[Kind, tuple[int, ...]], float] = {}
        for i in np.flatnonzero(self._stuck >= IN_A_ROW):
            found["stuck", (int(i),)] = norms[i]
        for i in np.flatnonzero((self._same >= IN_A_ROW).any(1)):
            equal = [int(i), *map(int, np.flatnonzero(self._same[i] >= IN_A_ROW))]
            if i == min(equal):
                found["duplicated", tuple(equal)] = distances[i, equal[1:]].max()
        for kind, ranks in found.keys() - self._identical:
            yield Alarm(grams.step, kind, ranks, (ALL,), float(found[kind, ranks]))
        self._identical = set(found)

    def _comparisons(self, places: Places, grams: StepGrams) -> Iterator[Alarm]:
        norms = np.where(np.isnan(grams.norms), np.inf, grams.norms)
        agreements = np.where(np.isnan(grams.agreements), np.inf, grams.agreements)
        # The others' values in order; of an even number the middle one that is nearer to this
        # rank's counts: a faulty one of two others must not make this one look faulty.
        others = np.sort(np.array([norms, agreements])[:, :, self._others], axis=3)
        middle = self._ranks - 1
        low, usual = others[..., (middle - 1) // 2]
        high = others[0, ..., middle // 2]
        # How many others are as far out, or further; ties count against an event.
        sides = np.array([norms, -norms, -agreements])
        further = (sides[..., None, :] >= sides[..., None]).sum(3) - 1
        comparable = (usual > 0) & np.isfinite(usual) & (self._ranks > 2)
        margin = np.where(comparable, _MARGIN * usual, np.nan)
        outside = [norms > self._factor * high, norms * self._factor < low, agreements < margin]
        events = (further < suspects(self._ranks)) & np.array(outside)
        self._grow(layers_up_to(places))
        evidence = self._evidence.add(places, events)
        now = np.array([norms == 0, agreements < -margin])
        self._shares[:, places] = _KEPT * self._shares[:, places] + (1 - _KEPT) * now
        if not self._said and not self._evidence.fired.any():
            return
        unlike_now = evidence[_UNLIKE] >= _ENOUGH
        ratios = norms / np.where(norms > low, high, low)
        yield from self._say(places, grams, unlike_now, ratios)

    def _say(
        self, places: Places, grams: StepGrams, unlike: Bools, ratios: Floats
    ) -> Iterator[Alarm]:
        """Return alarms of what has become so, those of the same kind and ranks as one."""
        layers = np.arange(layers_up_to(places))[places].tolist()
        held: dict[tuple[int, tuple[int, ...]], set[Kind]] = {}
        for row, rank in np.argwhere(self._evidence.fired[:, places].any(0)).tolist():
            finite = bool(np.isfinite(grams.norms[row, rank]))
            kinds = self._kinds(layers[row], rank, bool(unlike[row, rank]) or not finite)
            if self._ranks == 2 and "scaled" in kinds:
                kinds.remove("scaled")
                # Of a rank without a norm it is known which one it is.
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
            # What is said of the direction, or of all layers, needs no other word.
            if said - {"scaled"} or (row and (0, ranks) in self._said):
                continue
            for kind in kinds - said:
                news.setdefault((kind, ranks), []).append(row)
        for (kind, ranks), rows in news.items():
            values = grams.agreements if kind in ("wild", "flipped") else ratios
            names = tuple(grams.names[row] for row in rows)
            yield Alarm(grams.step, kind, ranks, names, float(values[rows[0], ranks[0]]))

    def _kinds(self, place: int, rank: int, unlike: bool) -> set[Kind]:
        """Return what a rank is in a layer, by the tests that have fired."""
        fired, (zero, opposed) = self._evidence.fired[:, place, rank], self._shares[:, place, rank]
        direction: Kind = "flipped" if opposed >= 0.5 else "wild"
        found: set[Kind] = set()
        if fired[_UNLIKE]:
            found.add(direction)
        if fired[_LONG]:
            found.add(direction if unlike else "scaled")
        if fired[_SHORT]:
            found.add("zero" if zero >= 0.5 else "scaled")
        return found

    def _grow(self, layers: int) -> None:
        self._evidence.grow(layers)
        missing = layers - self._shares.shape[1]
        if missing > 0:
            self._shares = np.pad(self._shares, [(0, 0), (0, missing), (0, 0)])
