"""Process sets: collectives among some of the ranks, with Horovod's names.

A ProcessSet is only a list of ranks, so all ranks of `collectives.run_threads` may share one
object. Its group belongs to the calling rank's default group, and ends with that one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from adasum.horovod.arguments import require
from collectives import Group, default_group, validation


class ProcessSet:
    """Some of the ranks, in ascending order; usable once every rank has added it.

    Args:
        ranks: Global ranks, each once.

    Raises:
        TypeError: `ranks` is not a list of ints.
        ValueError: `ranks` is empty, or has negative or repeated ranks.

    Examples:
        >>> hvd.ProcessSet([0]).ranks
        [0]
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if isinstance(ranks, Tensor) or not isinstance(ranks, Iterable):
            raise TypeError(f"ranks must be a list of ranks, got {type(ranks).__name__}")
        members = list(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in members):
            raise TypeError(f"ranks must be ints, got {members!r}")
        if not members or min(members) < 0 or len({*members}) < len(members):
            raise ValueError(f"ranks must be one or more different ranks, got {members!r}")
        self._ranks = sorted(members)

    @property
    def ranks(self) -> list[int]:
        """The global ranks in the set."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """The number of the set; None before it is added and after its removal."""
        entry = _process_sets().get(tuple(self.ranks))
        return None if entry is None else entry.number

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return default_group().rank in self.ranks

    def size(self) -> int | None:
        """Return the number of ranks in the set, or None if it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's number within the set, or None if the set is not added.

        Raises:
            ValueError: This rank is not in the set.
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
        """Make the set of all ranks; their number is read on each use."""

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


class _ProcessSets(dict[tuple[int, ...], _Entry]):
    """The sets added on one rank's default group, by their ranks."""

    last_number = 0


_of_group: weakref.WeakKeyDictionary[Group, _ProcessSets] = weakref.WeakKeyDictionary()
# Ranks may be threads; setdefault of a WeakKeyDictionary is not atomic.
_lock = threading.Lock()


def _process_sets() -> _ProcessSets:
    with _lock:
        return _of_group.setdefault(default_group(), _ProcessSets())


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable and return it; collective over all ranks.

    Every rank must call it, with the same ranks and in the same order. A set with the same ranks as
    an earlier one keeps that one's number.

    Examples:
        >>> hvd.init()
        >>> first = hvd.add_process_set([0])
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=first)
        tensor([1., 1.])
        >>> hvd.get_process_set_ids_and_ranks(), hvd.process_set_by_id(1)
        ({0: [0], 1: [0]}, ProcessSet(ranks=[0]))
        >>> hvd.remove_process_set(first)
        True
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    key = tuple(process_set.ranks)
    added = _process_sets()
    if process_set is not global_process_set and key not in added:
        group = default_group().split(key)
        added.last_number += 1
        added[key] = _Entry(added.last_number, group)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set, and every ProcessSet of the same ranks; collective over all ranks.

    Returns:
        False, and nothing is done, for the global set and for a set that is not added.
    """
    require("process_set", process_set, ProcessSet)
    key = tuple(process_set.ranks)
    if process_set is global_process_set or key not in _process_sets():
        return False
    default_group().barrier(f"remove_process_set {list(key)}")
    group = _process_sets().pop(key).group
    if group is not None:
        group.close()
    return True


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the set with this number; raise ValueError if it does not exist."""
    validation.integer("process_set_id", process_set_id)
    known = get_process_set_ids_and_ranks()
    if process_set_id not in known:
        raise ValueError(f"no process set has the number {process_set_id}")
    return ProcessSet(known[process_set_id]) if process_set_id else global_process_set


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every set by its number; 0 is the global set."""
    added = {entry.number: list(ranks) for ranks, entry in _process_sets().items()}
    return {0: global_process_set.ranks, **added}


def group_of(process_set: ProcessSet | None) -> Group | None:
    """Return the group of a set's ranks, or the default group for None.

    Returns None on ranks outside the set. Raises TypeError unless the argument is a ProcessSet or
    None, ValueError if the set was not added.
    """
    if process_set is None or process_set is global_process_set:
        return default_group()
    require("process_set", process_set, ProcessSet)
    entry = _process_sets().get(tuple(process_set.ranks))
    if entry is None:
        raise ValueError(
            f"{process_set} is not known: call add_process_set on every rank, or give it to init"
        )
    return entry.group


def require_group(process_set: ProcessSet | None) -> Group:
    """Return the group of a set's ranks; raise ValueError on ranks outside the set."""
    group = group_of(process_set)
    if group is None:
        raise ValueError(
            f"rank {default_group().rank} is not part of {process_set}: only its ranks may call"
        )
    return group


def group_and_root(process_set: ProcessSet | None, root_rank: int) -> tuple[Group, int]:
    """Return the set's group and a global rank's number in it; ValueError if it is outside."""
    group = require_group(process_set)
    validation.integer("root_rank", root_rank)
    if process_set is None or process_set is global_process_set:
        validation.rank("root_rank", root_rank, group.size)
        return group, root_rank
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank {root_rank} is not part of {process_set}")
    return group, process_set.ranks.index(root_rank)
