"""The tensors of a state: the memory to send, and the comparison of names and kinds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from collectives import CollectiveMismatchError, Group, validation

# Prefixes that wrappers put before the names of a module's own parameters.
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "_checkpoint_wrapped_module.": "checkpoint_wrapper",
}
_ERRORS = {b"\1": TypeError, b"\2": ValueError}


class Entry(NamedTuple):
    """A tensor of a state.

    target: its memory, each element once (without expanded dimensions); sent: the same values,
    contiguous: the target itself if it is contiguous; kind: dtype, shape and device, for the
    comparison.
    """

    name: str
    target: Tensor
    sent: Tensor
    kind: str

    def store(self) -> None:
        """Copy the received values to the target."""
        if self.sent is not self.target:
            self.target.copy_(self.sent)


def entry_of(name: str, argument: str, tensor: Tensor) -> Entry:
    """Return a tensor's entry; raise an error with the name `argument` if it cannot be sent."""
    if is_lazy(tensor):
        validation.entry(argument, tensor)
    validation.plain(argument, tensor)
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if not dense:
        validation.entry(argument, tensor)
    # Detached: autograd must not record the received values.
    target = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = f"{dtype} {tuple(target.shape)} on {target.device.type}"
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target = target.narrow(dimension, 0, 1)
    if target.shape != tensor.shape:
        kind += f", expanded from {tuple(target.shape)}"
    held = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    sent = target if held else target.resolve_conj().resolve_neg().contiguous()
    validation.entry(argument, sent)
    return Entry(name, target, sent, kind)


def agreed(
    group: Group, ranks: Sequence[int], call: str, entries: Callable[[], list[Entry]]
) -> list[Entry]:
    """Return this rank's entries if all ranks have the same names and kinds; collective.

    Ranks that have joined take no part. `ranks` are the global numbers of the group's ranks, `call`
    is the function that the user called. If `entries` raises TypeError or ValueError on any rank,
    every rank raises it. If entries differ, every rank raises CollectiveMismatchError.
    """
    mine: list[Entry] = []
    rows: list[tuple[str, str]] = []
    try:
        mine = entries()
    # torch raises RuntimeError for tensors without memory.
    except (TypeError, ValueError, RuntimeError) as error:
        report = (b"\2" if isinstance(error, ValueError) else b"\1") + str(error).encode()
    else:
        rows = [(entry.name, entry.kind) for entry in mine]
        report = b"\0" + hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).digest()
    answers = group.all_gather_bytes(report, name=f"{call}: comparison of what it was given")
    for rank, answer in zip(ranks, answers, strict=True):
        if answer[:1] in _ERRORS:
            raise _ERRORS[answer[:1]](f"rank {rank}: {answer[1:].decode()}")
    if len({answer for answer in answers if answer}) > 1:
        sent = group.all_gather_bytes(json.dumps(rows).encode(), name=f"{call}: what differs")
        by_rank = {rank: json.loads(each) for rank, each in zip(ranks, sent, strict=True) if each}
        raise CollectiveMismatchError(f"{call}: {_difference(by_rank)}")
    return mine


def _difference(by_rank: dict[int, list[tuple[str, str]]]) -> str:
    """Return a text that says how the ranks' entries, (name, kind), differ."""
    first, *others = by_rank
    rank = next(each for each in others if by_rank[each] != by_rank[first])
    mine, theirs = by_rank[first], by_rank[rank]
    names, their_names = [name for name, _ in mine], [name for name, _ in theirs]
    missing = next((name for name in names if name not in set(their_names)), None)
    added = next((name for name in their_names if name not in set(names)), None)
    if missing is None and added is None:
        if names != their_names:
            return f"ranks {first} and {rank} have the same names in another order"
        for (name, kind), (_, other) in zip(mine, theirs, strict=True):
            if kind != other:
                return f"{name} is {kind} on rank {first} and {other} on rank {rank}"
    parts = [
        f"rank {has} has {name!r}, which rank {lacks} has not"
        for name, has, lacks in ((missing, first, rank), (added, rank, first))
        if name is not None
    ]
    return " and ".join(parts) + _hint(names, their_names)


def _hint(names: Sequence[str], others: Sequence[str]) -> str:
    """Return advice for the error, with the wrapper if names differ only by its prefix."""
    for prefix, wrapper in _WRAPPERS.items():
        bare, theirs = (sorted(n.replace(prefix, "") for n in each) for each in (names, others))
        if bare == theirs:
            return (
                f": {prefix!r} is what {wrapper} puts before names; wrap the model on every rank "
                "or on none before this call"
            )
    return ": build the model in the same way on every rank"
