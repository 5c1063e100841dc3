"""How far the ranks' gradients disagree, layer by layer: is there anything for Adasum to add up?

For one layer with gradients g_1 .. g_n on n ranks the ratio is

    |Adasum(g_1 .. g_n)|^2 / (|g_1|^2 + .. + |g_n|^2)

1 when they are orthogonal, 1/n when they are equal: there Adasum is the average, and more ranks
buy no longer steps. It is never above 1; opposed gradients bring it to 0. Source: Maleki et al.,
"Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924, the section on the
orthogonality of gradients.

    recorder = adasum.orthogonality.Recorder(every=10)
    optimizer.watch(recorder)
    ...
    recorder.rows  # [Row(step=0, name="fc.weight", ratio=0.61), ...]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adasum.reducer import Adasum
from collectives import Group, Sum, default_group, validation
from collectives.initialize import group_or_default

__all__ = ["Recorder", "Row", "orthogonality"]


class Row(NamedTuple):
    """step: earlier reductions of this tensor; ratio: NaN where the tensor is zero on all ranks."""

    step: int
    name: str
    ratio: float


def orthogonality(tensors: Sequence[Tensor], group: Group | None = None) -> Tensor:
    """The ratio of each tensor over the ranks, [len(tensors)] float64; the tensors stay unchanged.

    Reduces copies with Adasum. group: the default group unless given. A tensor that is zero on
    every rank has no ratio: NaN. Collective; TypeError for dtypes that Adasum does not take.
    """
    group = group_or_default(group)
    for tensor in validation.tensors("tensors", tensors, dense=True):
        Adasum.check(tensor.dtype)
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    squares = squared_norms(copies)
    group.grouped_all_reduce(copies, Adasum, name="orthogonality")
    return _ratios(squares, copies, group)


class Recorder:
    """A watcher (`adasum.watch`) that records the ratio of every tensor at every so many steps.

    every: steps from one record to the next; the first step is recorded. group: the ranks that the
    watched reductions run over; the default group unless given. Every rank watches with a recorder
    of its own, made with the same arguments, and gets the same rows.

    A record costs one all-reduce of a float64 per tensor. It divides the answer that the watched
    reduction gives, so only with op=Adasum over all ranks, without a compression that loses much,
    is the ratio the one above. Orthogonal and equal tensors give 1 and n under Sum, 1/n^2 and 1/n
    under Average, 1/local_size^2 and 1/n under a two-level "inner/outer" Adasum. copies=True gives
    the ratio above under any op, for a copy of the tensors in flight and an Adasum of its own.

    What is recorded is what travels: gradients, or with Adasum's delta method the differences made
    by the local steps.
    """

    def __init__(
        self, every: int = 10, *, group: Group | None = None, copies: bool = False
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int >= 1, not {every!r}")
        self.every = every
        if group is not None and not isinstance(group, Group):
            raise TypeError(f"group must be a collectives.Group or None, not {group!r}")
        self._group = group
        self._copies = copies
        self._seen: Counter[str] = Counter()
        # Ratios stay on their device until they are read: recording must not wait for a GPU.
        self._records: list[tuple[list[tuple[int, str]], Tensor]] = []

    @property
    def rows(self) -> list[Row]:
        """Everything recorded so far, in the order of reduction."""
        return [
            Row(step, name, ratio)
            for places, ratios in self._records
            for (step, name), ratio in zip(places, ratios.tolist(), strict=True)
        ]

    def sent(self, names: Sequence[str], tensors: Sequence[Tensor]) -> _Token | None:
        """Remembers this rank's squared norms, or copies, of the tensors that are due."""
        # By name and not by call: buckets may be rebuilt, and a tensor be absent in some steps.
        due = [i for i, name in enumerate(names) if self._seen[name] % self.every == 0]
        places = [(self._seen[names[i]], names[i]) for i in due]
        self._seen.update(names)
        if not due:
            return None
        chosen = [tensors[i].detach() for i in due]
        if self._copies:
            return _Token(due, places, None, [tensor.clone() for tensor in chosen])
        return _Token(due, places, squared_norms(chosen), None)

    def reduced(self, token: _Token | None, tensors: Sequence[Tensor]) -> None:
        """Records the ratios, by one small all-reduce or by an Adasum of the copies."""
        if token is None:
            return
        group = self._group or default_group()
        if token.copies is not None:
            ratios = orthogonality(token.copies, group)
        else:
            assert token.squares is not None
            answers = [tensors[i].detach() for i in token.due]
            ratios = _ratios(token.squares, answers, group)
        self._records.append((token.places, ratios))


class _Token(NamedTuple):
    due: list[int]
    places: list[tuple[int, str]]
    squares: Tensor | None
    copies: list[Tensor] | None


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """|t|^2 of each tensor, [len(tensors)] float64 on the first one's device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square()


def _ratios(squares: Tensor, answers: Sequence[Tensor], group: Group) -> Tensor:
    group.all_reduce(squares, Sum, name="orthogonality's squared norms")
    return squared_norms(answers) / squares
