"""Which parameters an optimizer's gradients are reduced for, by what name, in which bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from collectives import plan_groups

__all__ = [
    "BUCKET_MIB",
    "Groups",
    "Named",
    "PlanBuckets",
    "by_kind",
    "name_parameters",
    "plan_buckets",
]

Named: TypeAlias = tuple[str, Tensor]
PlanBuckets: TypeAlias = Callable[[Sequence[Named]], list[list[Named]]]
Groups: TypeAlias = int | Sequence[Sequence[Tensor]] | None

# torch's DistributedDataParallel uses the same size: large enough that a message's latency is small
# beside it, small enough that the first one leaves early in backward.
BUCKET_MIB = 25.0


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[Named] | None
) -> list[Named]:
    """(name, parameter) of every parameter of the optimizer, each once, in registration order.

    Registration order is that of `named_parameters`, else of the optimizer's groups. A parameter
    listed under two names (tied weights) goes by the first. Named parameters that are not in the
    optimizer are left out, so that two optimizers may share one model.

    Raises ValueError naming the offenders: duplicate names, parameters without a name, entries that
    are no (name, parameter) pairs.
    """
    owned: dict[int, tuple[str, Tensor]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            owned.setdefault(id(parameter), (f"allreduce.noname.{i}.{j}", parameter))
    if named_parameters is None:
        return list(owned.values())

    entries = list(named_parameters)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(
                "named_parameters must be (name, parameter) tuples as model.named_parameters() "
                f"gives them, not {type(entry).__name__}"
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
        f"param_groups[{place.split('.')[2]}]['params'][{place.split('.')[3]}] of shape "
        f"{tuple(parameter.shape)}"
        for key, (place, parameter) in owned.items()
        if key not in chosen
    ]
    if unnamed:
        raise ValueError(
            "named_parameters must name every parameter of the optimizer; without a name: "
            + ", ".join(unnamed)
        )
    return list(chosen.values())


def plan_buckets(
    named: Sequence[Named],
    groups: Groups = None,
    *,
    memory_size: float | None = None,
    groups_size: int | None = None,
) -> list[list[Named]]:
    """Buckets of parameters in the order in which they are reduced, the same on every rank.

    Parameters are taken in reverse registration order, which is about the order in which backward
    produces their gradients. A bucket holds one dtype and one device, and closes before it grows
    past `memory_size` MiB or `groups_size` parameters (a larger parameter has a bucket to itself);
    past 25 MiB where neither is given.

    groups: an int k >= 1 makes k buckets of about equally many parameters instead; a list of
    lists of parameters makes a bucket of each and fills the rest by size. Buckets so asked for are
    split where dtype or device changes. ValueError for k < 1, for entries that are no tensors, and
    naming a parameter that is listed twice.
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
            f"groups must be a positive int or a list of lists of parameters, not {groups!r}"
        )
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups must be at least 1, not {groups}")
        share, extra = divmod(len(backwards), groups)
        cuts = [i * share + min(i, extra) for i in range(groups + 1)]
        lists = [backwards[cuts[i] : cuts[i + 1]] for i in range(groups)]
        return _in_order([part for each in lists for part in by_kind(each)], backwards)
    listed, rest = _listed(backwards, groups)
    return _in_order(listed + by_size(rest), backwards)


def _listed(
    backwards: list[Named], groups: Sequence[Sequence[Tensor]]
) -> tuple[list[list[Named]], list[Named]]:
    """(the buckets asked for, the parameters that are in none)."""
    names = {id(parameter): name for name, parameter in backwards}
    taken: set[int] = set()
    buckets: list[list[Named]] = []
    for number, group in enumerate(groups):
        members: list[Named] = []
        if not isinstance(group, list | tuple):
            raise ValueError(f"groups[{number}] must be a list of parameters, not {group!r}")
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError(
                    f"groups[{number}] must hold parameters, not {type(parameter).__name__}"
                )
            key = id(parameter)
            name = names.get(key, f"a tensor of shape {tuple(parameter.shape)}")
            if key in taken:
                raise ValueError(f"groups lists {name} twice")
            if key not in names:
                raise ValueError(f"groups[{number}] lists {name} that the optimizer does not have")
            taken.add(key)
            members.append((name, parameter))
        buckets.extend(by_kind(members))
    return buckets, [entry for entry in backwards if id(entry[1]) not in taken]


def by_kind(entries: Sequence[Named]) -> list[list[Named]]:
    """Parts of one dtype and one device each, in the order in which the first of each comes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    for entry in entries:
        kinds.setdefault((entry[1].dtype, entry[1].device), []).append(entry)
    return list(kinds.values())


def _in_order(buckets: list[list[Named]], backwards: Sequence[Named]) -> list[list[Named]]:
    """Sorted by each bucket's last member in backward's order: the one that completes it."""
    place = {id(parameter): i for i, (_, parameter) in enumerate(backwards)}
    return sorted(
        (bucket for bucket in buckets if bucket),
        key=lambda bucket: max(place[id(parameter)] for _, parameter in bucket),
    )
