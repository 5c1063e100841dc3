"""Which parameters an optimizer has: users put others into its groups between two steps.

Densification and pruning replace a parameter by one of another length, append some, or replace
whole groups, without `add_param_group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from adasum.optimizer.planning import Named


class Membership:
    """The parameters in an optimizer's groups, as they were when last looked at."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._seen = [list(group["params"]) for group in groups]

    def differs(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether there are others than at the last look, by identity."""
        now = [group["params"] for group in groups]
        return len(now) != len(self._seen) or not all(map(_same, now, self._seen))

    def update(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]
    ) -> tuple[list[Named], list[Tensor]]:
        """Return the parameters that have come, with names, and those that are in no group now.

        `names` are the names of the parameters that were there. One at the place of another that
        has gone has its name.
        """
        now = [group["params"] for group in groups]
        here = {parameter for group in now for parameter in group}
        gone = [parameter for parameter in names if parameter not in here]
        free = {names[parameter] for parameter in gone}
        taken = {name for parameter, name in names.items() if parameter in here}
        before = {(i, j): p for i, group in enumerate(self._seen) for j, p in enumerate(group)}
        new: dict[Tensor, str] = {}
        for i, group in enumerate(now):
            for j, parameter in enumerate(group):
                if parameter in names or parameter in new:
                    continue
                name = names.get(before[i, j], "") if (i, j) in before else ""
                if name not in free - taken:
                    name = _unused(f"allreduce.noname.{i}.{j}", taken)
                taken.add(name)
                new[parameter] = name
        self._seen = [list(group) for group in now]
        return [(name, parameter) for parameter, name in new.items()], gone


def _same(group: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(group) == len(other) and all(map(is_, group, other))


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "+"
    return name
