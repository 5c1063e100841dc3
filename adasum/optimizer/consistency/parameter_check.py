"""The check, by small messages, that all ranks have the same parameters and settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.consistency.descriptions import (
    Setting,
    describe_parameters,
    has_bits,
    setting_name,
)
from adasum.optimizer.planning import Named
from collectives import CollectiveMismatchError, Group
from collectives.modes import outside_modes

_VARIABLE = "ADASUM_CHECK_PARAMETERS"
# The comparison's name in errors, also if ranks disagree on whether to compare.
_CALL = f"check of the parameters, by check_parameters or {_VARIABLE}"
_CALL_AGAIN = "running check of the parameters, by check_every"
_OUT = f"check_parameters=False or {_VARIABLE}=0 leaves this check out"
# Bytes per running check, so that it takes some milliseconds; with larger models each check
# compares the next parameters.
_PART_BYTES = 16 * 2**20
# The value of a setting that the optimizer writes itself.
WRITTEN = "written by the optimizer"
_CAUSES = (
    "a checkpoint loaded on only one rank, a schedule that follows a rank's own loss "
    "(ReduceLROnPlateau), weights that forward changes (Embedding(max_norm=...)), code under "
    "`if rank == 0`"
)
_FIRST = (
    ": call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on every rank before the "
    f"first step. If that was done they have changed since; usual causes: {_CAUSES}; {_OUT}"
)
_COMPARED_BEFORE = (
    ". It was put into param_groups after the first step: make it of the same values on every "
    f"rank, or give it to hvd.broadcast_parameters; {_OUT}"
)


def checks_parameters(asked: bool | None) -> bool:
    """Return whether ranks compare: the argument or else ADASUM_CHECK_PARAMETERS, 1 by default.

    Raises ValueError if the argument is None and the variable is neither 0 nor 1.
    """
    if asked is not None:
        return asked
    text = os.environ.get(_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(
            f"{_VARIABLE} must be 1, for ranks to compare their parameters at the first step, or "
            f"0 for not, got {text!r}"
        )
    return text == "1"


@outside_modes()
def require_equal_parameters(
    group: Group,
    named: Sequence[Named],
    *,
    fix: str = "",
    settings: Sequence[Setting] = (),
    when: str = "before their first reduction",
    call: str = _CALL,
) -> bool:
    """Raise on every rank unless ranks have the same parameters, bit for bit; collective.

    Returns whether all ranks took part; ranks that have joined do not. `named` must be in the same
    order on all ranks; `settings` are further (name, value) that must be the same, unless the value
    is `WRITTEN` on some rank. For errors: `fix` is advice, `when` the time of the difference, and
    `call` the name of the comparison. The CollectiveMismatchError names the first setting or
    parameter that differs.
    """
    rows = describe_parameters(named)
    mine = json.dumps([settings, rows]).encode()
    digests = group.all_gather_bytes(hashlib.blake2b(mine, digest_size=16).digest(), name=call)
    if len({each for each in digests if each}) == 1:
        return all(digests)
    sent = group.all_gather_bytes(mine, name="what differs between the ranks")
    by_rank = {rank: json.loads(each) for rank, each in zip(group.ranks, sent, strict=True) if each}
    found = {rank: each[0] for rank, each in by_rank.items()}
    difference = _differing_setting(found, when)
    rows_of = {rank: each[1] for rank, each in by_rank.items()}
    written = any(WRITTEN in dict(each).values() for each in found.values())
    if not difference and written and all(each == rows for each in rows_of.values()):
        return all(digests)
    if not difference:
        difference = _differing_parameter(rows_of, when, fix)
    raise CollectiveMismatchError(difference)


def _differing_setting(by_rank: dict[int, list[list[str]]], when: str) -> str:
    """Return a text on the first setting that differs between ranks, or an empty one."""
    first, *others = by_rank
    mine = dict(by_rank[first])
    for rank in others:
        theirs = dict(by_rank[rank])
        for name in {**mine, **theirs}:
            values = [each.get(name, "not there") for each in (mine, theirs)]
            if values[0] != values[1] and WRITTEN not in values:
                return (
                    f"the ranks' settings differ {when}: {name} is {values[0]} on rank {first} "
                    f"and {values[1]} on rank {rank}: give DistributedOptimizer and the optimizer "
                    "in it the same on every rank, and a schedule that follows the loss the mean "
                    f"of all ranks, hvd.allreduce(loss); {_OUT}"
                )
    return ""


def _differing_parameter(by_rank: dict[int, list[list[str]]], when: str, fix: str) -> str:
    """Return a text on the difference between the ranks' rows of `describe_parameters`."""
    first, *others = by_rank
    rows = by_rank[first]
    for rank in others:
        theirs = by_rank[rank]
        for i, (mine, other) in enumerate(zip(rows, theirs, strict=False)):
            if mine[:2] == other[:2]:
                continue
            again = sorted(row[:2] for row in rows) == sorted(row[:2] for row in theirs)
            how = "the same parameters in another order" if again else "other parameters"
            return (
                f"ranks {first} and {rank} have {how}: parameter {i} is {' '.join(mine[:2])} on "
                f"rank {first} and {' '.join(other[:2])} on rank {rank}; build the model and the "
                "optimizer in the same way on every rank"
            )
        if len(rows) != len(theirs):
            return (
                f"the optimizer has {len(rows)} parameters on rank {first} and {len(theirs)} on "
                f"rank {rank}: build the model and the optimizer, and change its param_groups, in "
                "the same way on every rank"
            )
    differ = [i for i, row in enumerate(rows) if any(by_rank[rank][i] != row for rank in others)]
    if not differ:
        return (
            f"the ranks' parameters differ {when}, and did not a moment later: their threads train "
            "over one group at the same time, and have met each other's messages. Train in one "
            "thread, or give one optimizer a process_set"
        )
    ranks = [rank for rank in others if by_rank[rank][differ[0]] != rows[differ[0]]]
    return (
        f"the ranks' parameters differ {when}: {rows[differ[0]][0]} on ranks {ranks} is not what "
        f"it is on rank {first} ({len(differ)} of {len(rows)} parameters differ){fix}"
    )


class ParameterCheck:
    """Compares an optimizer's parameters and settings between the ranks.

    All of them are compared once, before their first reduction, and then a part of the parameters
    after each `every` steps, 0 for never. `settings` returns (name, value) of the present settings;
    with `compares=False` nothing is compared.
    """

    def __init__(
        self,
        group: Group,
        settings: Callable[[], Sequence[Setting]],
        *,
        every: int,
        compares: bool = True,
    ) -> None:
        self._group = group
        self._settings = settings
        self._every = every
        self._compares = compares
        self._new: dict[Tensor, str] = {}
        self._compared: dict[Tensor, str] = {}
        self._written: set[str] = set()
        self._steps = self._due = 0
        # The number of the first parameter in the next running check.
        self._next = 0

    def add(self, named: Sequence[Named]) -> None:
        """Add parameters, to be compared at the next reduction."""
        if self._compares:
            self._new.update((parameter, name) for name, parameter in named)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Stop comparing these parameters."""
        for parameter in parameters:
            self._new.pop(parameter, None)
            self._compared.pop(parameter, None)

    def run(self) -> bool:
        """Compare new parameters and the settings; collective if there are new parameters.

        Returns whether there were any, and all ranks took part. Raises CollectiveMismatchError on
        every rank if parameters or settings differ.
        """
        if not self._new or _is_capturing(self._new):
            return False
        named = [(name, parameter) for parameter, name in self._new.items()]
        fix = _COMPARED_BEFORE if self._compared else _FIRST
        everywhere = require_equal_parameters(
            self._group, named, fix=fix, settings=self._described()
        )
        # A rank that has joined compares at its own first step, and needs all others for it.
        if everywhere:
            self._compared.update(self._new)
            self._new = {}
        return everywhere

    def note_settings(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return the entries of the optimizer's groups, except parameters, before its step."""
        if not self._compares:
            return []
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def note_written(
        self, optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stop comparing settings, such as the rate, that the optimizer's own step has written."""
        for i, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=False)):
            for key, value in old.items():
                if group.get(key) is not value:
                    self._written.add(setting_name(key, i))

    def _described(self) -> list[Setting]:
        return [
            (name, WRITTEN if name in self._written else value) for name, value in self._settings()
        ]

    def run_again(self) -> None:
        """Count one step, and compare a part of the parameters if it is time; collective then.

        Raises CollectiveMismatchError on every rank if parameters or settings differ.
        """
        self._steps += 1
        self._due += 1
        is_time = self._every and self._due >= self._every
        if not is_time or not self._compared or _is_capturing(self._compared):
            return
        self._due = 0
        require_equal_parameters(
            self._group,
            self._next_part(),
            fix=f". Usual causes: {_CAUSES}; check_every=0 leaves this check out",
            settings=self._described(),
            when=f"after {self._steps} steps",
            call=_CALL_AGAIN,
        )

    def _next_part(self) -> list[Named]:
        """Return the parameters for this comparison."""
        named = [(name, p.detach()) for p, name in self._compared.items() if has_bits(p)]
        part: list[Named] = []
        while len(part) < len(named) and sum(p.nbytes for _, p in part) < _PART_BYTES:
            part.append(named[self._next % len(named)])
            self._next = (self._next + 1) % len(named)
        return part


def _is_capturing(parameters: Iterable[Tensor]) -> bool:
    """Return whether a CUDA graph is being captured, which cannot contain a copy to the host."""
    return any(each.is_cuda for each in parameters) and torch.cuda.is_current_stream_capturing()
