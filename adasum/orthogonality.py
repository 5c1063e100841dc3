"""How orthogonal the ranks' gradients are, layer by layer: is there anything for Adasum to gain?

For one layer with gradients g_1 .. g_n on n ranks the ratio is ::

    |Adasum(g_1 .. g_n)|^2 / (|g_1|^2 + .. + |g_n|^2)

It is 1 if the gradients are orthogonal, and 1/n if they are equal: then Adasum is the average, and
more ranks allow no longer steps. It is never above 1, and is 0 if the gradients cancel. Source:
Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924, the section
on the orthogonality of gradients. Adasum by `direct` has all of these norms in its Gram matrices;
for any other reduction each rank computes the norms of its own tensors and of the results. ::

    recorder = adasum.orthogonality.Recorder(every=10)
    optimizer.set_observer(recorder)
    ...
    recorder.rows  # [Row(step=0, name="fc.weight", ratio=0.61), ...]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

import kernels
from adasum.observer import ObservedGram, squared_norms_by
from adasum.real_pairs import as_reals
from adasum.reducer import Adasum
from collectives import Group, Sum, default_group, validation
from collectives.schedules.halving import balanced_tree

__all__ = ["Recorder", "Row", "orthogonality"]


_Labels: TypeAlias = list[tuple[int, str]]
# The labels to record, and a function that returns their ratios, given the results.
_Token: TypeAlias = tuple[_Labels, Callable[[Sequence[Tensor]], Tensor]]


class Row(NamedTuple):
    """A recorded ratio.

    Attributes:
        step: How many times this tensor had been reduced before.
        name: The tensor's name.
        ratio: NaN if the tensor is zero on all ranks.
    """

    step: int
    name: str
    ratio: float


def orthogonality(tensors: Sequence[Tensor], group: Group | None = None) -> Tensor:
    """Return each tensor's ratio over the ranks; collective.

    It reduces copies of the tensors with Adasum.

    Args:
        tensors: Equal in shape and dtype on all ranks; not changed.
        group: The ranks; the default group unless given.

    Returns:
        float64 [len(tensors)]; NaN for tensors that are zero on every rank.

    Raises:
        TypeError: Adasum does not reduce a tensor's dtype.
    """
    validation.instance("group", group, Group | None, "a collectives.Group or None")
    for tensor in validation.tensors("tensors", tensors, dense=True):
        Adasum.check(tensor.dtype)
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    found: dict[int, Tensor] = {}
    # One reduction per kind, as in training, so that its Gram matrices hold its tensors only.
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    for chosen in kinds.values():
        of_kind = _ratios_of_copies([tensors[i].detach() for i in chosen], group)
        found |= zip(chosen, of_kind.to(tensors[0].device).unbind(), strict=True)
    return torch.stack([found[i] for i in range(len(tensors))])


def _ratios_of_copies(tensors: Sequence[Tensor], group: Group | None) -> Tensor:
    """Return the ratios of tensors of one dtype and device."""
    reals = [as_reals(tensor.resolve_conj()) for tensor in tensors]
    copies = [real.clone(memory_format=torch.contiguous_format) for real in reals]
    op, group = Adasum.observed(), group or default_group()
    by_gram = group.reduces_by_tree(copies, op)
    group.grouped_all_reduce(copies, op, name="orthogonality")
    gram = op.take_gram() if by_gram else None
    return _ratios(squared_norms(reals), copies, group) if gram is None else _ratios_by(gram)


class Recorder:
    """An observer (`adasum.observer`) that records every tensor's ratio each `every` steps.

    The numerator is the result of the observed reduction, so the ratio is the module's only with
    op=Adasum over all ranks and without a lossy compression. Orthogonal tensors give 1 under Sum
    and 1/n^2 under Average, equal tensors n and 1. `copies=True` gives the module's ratio under
    any op.

    It records the tensors that are sent: gradients or, with Adasum's delta method, differences of
    parameters. Every rank needs a recorder, made with the same arguments, and gets the same rows.
    If the reduction computes Gram matrices, as Adasum by `direct` does, recording reads no tensor
    and sends no message. Otherwise it costs one all-reduce of one float64 per tensor.

    Args:
        every: Steps from one record to the next; the first step is recorded.
        group: The ranks that the observed reductions run over; the default group unless given.
        copies: Whether to reduce copies of the tensors with Adasum, which takes memory for them.
            If there are Gram matrices, the ratio follows from those, without copies.

    Raises:
        TypeError: `group` is not a Group.
        ValueError: `every` is not a positive int.
    """

    def __init__(
        self, every: int = 10, *, group: Group | None = None, copies: bool = False
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an int >= 1, got {every!r}")
        self.every = every
        if group is not None and not isinstance(group, Group):
            raise TypeError(f"group must be a collectives.Group or None, got {group!r}")
        self._group = group
        self._copies = copies
        self._reductions: Counter[str] = Counter()
        # Ratios stay on their device until they are read: recording must not wait for a GPU.
        self._records: list[tuple[_Labels, Tensor]] = []

    @property
    def rows(self) -> list[Row]:
        """Everything recorded so far, in the order of reduction."""
        return [
            Row(step, name, ratio)
            for labels, ratios in self._records
            for (step, name), ratio in zip(labels, ratios.tolist(), strict=True)
        ]

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> _Token | None:
        """Keep the squared norms, or copies, of the tensors that are due."""
        due, labels = self._count(names)
        if not due:
            return None
        chosen = [tensors[i].detach() for i in due]
        if self._copies:
            copies = [tensor.clone() for tensor in chosen]
            return labels, lambda _: orthogonality(copies, self._group)
        squares = squared_norms(chosen)

        def ratios(results: Sequence[Tensor]) -> Tensor:
            return _ratios(squares, [results[i].detach() for i in due], self._group)

        return labels, ratios

    def after_reduction(self, token: _Token | None, tensors: Sequence[Tensor]) -> None:
        """Record the ratios, by one small all-reduce or by an Adasum of the copies."""
        if token is not None:
            labels, ratios = token
            self._records.append((labels, ratios(tensors)))

    def after_gram(self, names: Sequence[str], gram: ObservedGram) -> None:
        """Record the ratios of the tensors that are due, from their Gram matrices."""
        due, labels = self._count(names)
        if not due:
            return
        tree = balanced_tree(gram.products.shape[1])
        if self._copies and tuple(gram.tree) != tuple(tree):
            # The observed Adasum has other weights.
            coefficients = kernels.adasum_coefficients(gram.products.unsqueeze(0), tree)
            gram = gram._replace(coefficients=coefficients, tree=tree)
        ratios = _ratios_by(gram).unbind()
        # Not by a tensor of indices: its copy to a GPU would wait for the GPU.
        self._records.append((labels, torch.stack([ratios[i] for i in due])))

    def _count(self, names: Sequence[str]) -> tuple[list[int], _Labels]:
        """Count a reduction; return the indices of its tensors to record, and their labels."""
        # Steps are counted by name: buckets may be rebuilt, and tensors be absent in some steps.
        due = [i for i, name in enumerate(names) if self._reductions[name] % self.every == 0]
        labels = [(self._reductions[names[i]], names[i]) for i in due]
        self._reductions.update(names)
        return due, labels


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return |t|^2 of each tensor, float64 [len(tensors)] on the first one's device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    reals = [as_reals(tensor.resolve_conj()) for tensor in tensors]
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in reals]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).square()


def _ratios(squares: Tensor, results: Sequence[Tensor], group: Group | None) -> Tensor:
    (group or default_group()).all_reduce(squares, Sum, name="orthogonality's squared norms")
    return squared_norms(results) / squares


def _ratios_by(gram: ObservedGram) -> Tensor:
    total = gram.products.diagonal(dim1=1, dim2=2).sum(1)
    return squared_norms_by(gram.products, gram.coefficients) / total
