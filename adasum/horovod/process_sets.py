"""Process sets: collectives among some of the ranks, with Horovod's names.

What a set means depends on the rank that asks: one ProcessSet object may be shared by the ranks of
`collectives.run_threads`. The groups behind the sets belong to the default group and end with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from collectives import Group, default_group

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "group_of",
    "members_of",
    "process_set_by_id",
    "remove_process_set",
    "root_of",
]


class ProcessSet:
    """Some of the ranks, in ascending order; usable once every rank has added it.

    TypeError or ValueError for what is not a list of different ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if isinstance(ranks, Tensor) or not isinstance(ranks, Iterable):
            raise TypeError(f"ranks must be a list of ranks, not {type(ranks).__name__}")
        members = list(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in members):
            raise TypeError(f"ranks must be ints, not {members!r}")
        if not members or min(members) < 0 or len({*members}) < len(members):
            raise ValueError(f"ranks must be one or more different ranks, not {members!r}")
        self._ranks = sorted(members)

    @property
    def ranks(self) -> list[int]:
        """The global ranks in the set."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """The number the set was added under; None where it is not added, or removed again."""
        entry = _sets().get(tuple(self.ranks))
        return None if entry is None else entry.number

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return default_group().rank in self.ranks

    def size(self) -> int | None:
        """The number of ranks in the set; None where it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's number within the set; None where it is not added.

        ValueError on a rank that is not in it.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {default_group().rank} is not part of {self}")
        return self.ranks.index(default_group().rank)

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        """All ranks, how many there may be."""

    @property
    def ranks(self) -> list[int]:
        return list(range(default_group().size))

    @property
    def process_set_id(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = _GlobalProcessSet()


class _Entry(NamedTuple):
    number: int
    group: Group | None


class _Sets(dict[tuple[int, ...], _Entry]):
    """The sets added on one rank's default group."""

    last = 0


_of_group: weakref.WeakKeyDictionary[Group, _Sets] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _sets() -> _Sets:
    with _lock:
        return _of_group.setdefault(default_group(), _Sets())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set usable; every rank calls it, with the same ranks and in the same order.

    Returns the set. Ranks that were added before get the number they have.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    key = tuple(process_set.ranks)
    sets = _sets()
    if process_set is not global_process_set and key not in sets:
        group = default_group().split(key)
        sets.last += 1
        sets[key] = _Entry(sets.last, group)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set, and every ProcessSet of the same ranks; every rank calls it.

    False, and nothing done, for the global set and for one that is not added.
    """
    key = tuple(_checked(process_set).ranks)
    if process_set is global_process_set or key not in _sets():
        return False
    default_group().barrier(f"remove_process_set {list(key)}")
    group = _sets().pop(key).group
    if group is not None:
        group.close()
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The set with this number; ValueError where there is none."""
    if isinstance(process_set_id, bool) or not isinstance(process_set_id, int):
        raise TypeError(f"process_set_id must be an int, not {type(process_set_id).__name__}")
    if process_set_id == 0:
        return global_process_set
    for ranks, entry in _sets().items():
        if entry.number == process_set_id:
            return ProcessSet(ranks)
    raise ValueError(f"no process set has the number {process_set_id}")


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every set, by its number; 0 is the global one."""
    numbers = {entry.number: list(ranks) for ranks, entry in _sets().items()}
    return {0: global_process_set.ranks, **numbers}


def group_of(process_set: ProcessSet | None) -> Group | None:
    """The group of a set's ranks; None where this rank is not in it. None: the default group.

    TypeError for what is no ProcessSet, ValueError for one that was not added.
    """
    if process_set is None or _checked(process_set) is global_process_set:
        return default_group()
    entry = _sets().get(tuple(process_set.ranks))
    if entry is None:
        raise ValueError(
            f"{process_set} is not known: call add_process_set on every rank, or give it to init"
        )
    return entry.group


def members_of(process_set: ProcessSet | None) -> Group:
    """As `group_of`, where only the set's ranks may call: ValueError naming any other one."""
    group = group_of(process_set)
    if group is None:
        raise ValueError(
            f"rank {default_group().rank} is not part of {process_set}: only its ranks may call"
        )
    return group


def root_of(process_set: ProcessSet | None, root_rank: int) -> int:
    """The number within the set of a global rank; ValueError where it is not in the set."""
    if isinstance(root_rank, bool) or not isinstance(root_rank, int):
        raise TypeError(f"root_rank must be an int, not {type(root_rank).__name__}")
    if process_set is None or _checked(process_set) is global_process_set:
        return root_rank
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank {root_rank} is not part of {process_set}")
    return process_set.ranks.index(root_rank)


def _checked(process_set: ProcessSet) -> ProcessSet:
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, not {type(process_set).__name__}")
    return process_set
