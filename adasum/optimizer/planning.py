"""The names of an optimizer's parameters, and their division into buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from collectives import plan_groups, split_bounds

Entry = TypeVar("Entry")
Named: TypeAlias = tuple[str, Tensor]
PlanBuckets: TypeAlias = Callable[[Sequence[Named]], list[list[Named]]]
Groups: TypeAlias = int | Sequence[Sequence[Tensor]] | None

# The size in torch's DistributedDataParallel: large enough to make a message's latency small in
# comparison, small enough to send the first bucket early in backward.
BUCKET_MIB = 25.0


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Named] | None
) -> list[Named]:
    """Return (name, parameter) of every parameter of the optimizer, in registration order.

    Registration order is the order of `named_parameters` or, without them, of the optimizer's
    groups. A parameter with two names (tied weights) gets the first one. Named parameters that are
    not in the optimizer are left out, so that two optimizers may share one model. Raises ValueError
    for repeated names, parameters without a name, and entries that are not (name, parameter).
    """
    owned = {
        id(parameter): (i, j, parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return [(f"allreduce.noname.{i}.{j}", parameter) for i, j, parameter in owned.values()]

    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError("named_parameters must be model.named_parameters(), not the model itself")
    entries = list(named_parameters)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(
                "named_parameters must be (name, parameter) tuples as model.named_parameters() "
                f"gives them, got {type(entry).__name__}"
            )
    repeated = sorted(name for name, n in Counter(name for name, _ in entries).items() if n > 1)
    if repeated:
        raise ValueError(
            f"the names in named_parameters must be unique; repeated: {', '.join(repeated)}"
        )
    chosen: dict[int, Named] = {}
    for name, parameter in entries:
        if id(parameter) in owned:
            chosen.setdefault(id(parameter), (name, parameter))
    unnamed = [
        f"param_groups[{i}]['params'][{j}] of shape {tuple(parameter.shape)}"
        for key, (i, j, parameter) in owned.items()
        if key not in chosen
    ]
    if unnamed:
        raise ValueError(
            "named_parameters must name every parameter of the optimizer; without a name: "
            + ", ".join(unnamed)
        )
    return list(chosen.values())


def name_new(
    names: Mapping[Tensor, str],
    before: Sequence[Sequence[Tensor]],
    now: Sequence[Sequence[Tensor]],
) -> list[Named]:
    """Return (name, parameter) of new parameters in an optimizer's groups.

    `names` are the names of the former parameters. A new parameter in the place of one that is gone
    gets its name.
    """
    taken = {names[p] for group in now for p in group if p in names}
    held = {(i, j): p for i, group in enumerate(before) for j, p in enumerate(group)}
    new: dict[Tensor, str] = {}
    for i, group in enumerate(now):
        for j, parameter in enumerate(group):
            if parameter in names or parameter in new:
                continue
            name = names.get(held[i, j], "") if (i, j) in held else ""
            if not name or name in taken:
                name = f"allreduce.noname.{i}.{j}"
            while name in taken:
                name += "+"
            taken.add(name)
            new[parameter] = name
    return [(name, parameter) for parameter, name in new.items()]


def plan_buckets(
    named: Sequence[Named],
    groups: Groups = None,
    *,
    memory_size: float | None = None,
    groups_size: int | None = None,
) -> list[list[Named]]:
    """Divide parameters into buckets, in the order of their reduction, the same on every rank.

    Parameters come in reverse registration order, roughly the order of backward. Each bucket has
    one dtype and one device, and closes before it exceeds `memory_size` MiB (25 if no size is
    given) or `groups_size` parameters; a larger parameter has its own bucket. With an int k for
    `groups` there are k buckets with about equal numbers of parameters. With a list of lists of
    parameters, each list is a bucket, and the rest is divided by size. Such buckets are split by
    dtype and device. Raises ValueError if k < 1, an entry is not a parameter of the optimizer, or a
    parameter is listed twice.
    """
    backwards = list(reversed(named))
    if memory_size is None and groups_size is None:
        memory_size = BUCKET_MIB

    def by_size(entries: Sequence[Named]) -> list[list[Named]]:
        parameters = [parameter for _, parameter in entries]
        plan = plan_groups(parameters, memory_size=memory_size, groups_size=groups_size)
        return [[entries[i] for i in group] for group in plan]

    if groups is None:
        return by_size(backwards)
    if isinstance(groups, bool) or not isinstance(groups, int | list | tuple):
        raise ValueError(
            f"groups must be a positive int or a list of lists of parameters, got {groups!r}"
        )
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        cuts = pairwise(split_bounds(len(backwards), groups))
        parts = [part for low, high in cuts for part in by_kind(backwards[low:high])]
        return _in_order(parts, backwards)
    listed, rest = _listed(backwards, groups)
    return _in_order(listed + by_size(rest), backwards)


def _listed(
    backwards: list[Named], groups: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Named]], list[Named]]:
    """Return (the listed buckets, the parameters in none of them)."""
    names = {id(parameter): name for name, parameter in backwards}
    taken: set[int] = set()
    buckets: list[list[Named]] = []
    for number, group in enumerate(groups):
        if not isinstance(group, list | tuple):
            raise ValueError(f"groups[{number}] must be a list of parameters, got {group!r}")
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"groups[{number}] must hold parameters, got {type(parameter).__name__}"
                )
            key = id(parameter)
            name = names.get(key, f"a tensor of shape {tuple(parameter.shape)}")
            if key in taken:
                raise ValueError(f"groups lists {name} twice")
            if key not in names:
                raise ValueError(f"groups[{number}] lists {name} that the optimizer does not have")
            taken.add(key)
        buckets.extend(by_kind([(names[id(parameter)], parameter) for parameter in group]))
    return buckets, [entry for entry in backwards if id(entry[1]) not in taken]


def by_kind(
    entries: Iterable[tuple[Entry, Tensor]],
    dtype_of: Callable[[Tensor], torch.dtype] = lambda each: each.dtype,
) -> list[list[tuple[Entry, Tensor]]]:
    """Split entries by dtype and device, in the order of each kind's first entry."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Entry, Tensor]]] = {}
    for entry in entries:
        kinds.setdefault((dtype_of(entry[1]), entry[1].device), []).append(entry)
    return list(kinds.values())


def _in_order(buckets: list[list[Named]], backwards: Sequence[Named]) -> list[list[Named]]:
    """Sort buckets by the member that completes them: the last in the order of backward."""
    position = {id(parameter): i for i, (_, parameter) in enumerate(backwards)}
    return sorted(
        (bucket for bucket in buckets if bucket),
        key=lambda bucket: max(position[id(parameter)] for _, parameter in bucket),
    )
