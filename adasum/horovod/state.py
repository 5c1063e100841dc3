"""Horovod's functions that give all ranks the root's parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adasum.horovod.objects import allgather_object, broadcast_object
from adasum.horovod.process_sets import ProcessSet, global_process_set, group_and_root
from adasum.horovod.state_entries import Entry, agreed, entry_of
from collectives import Group, Work, default_group

# The last part of the name of get_extra_state()'s result in a state_dict.
_EXTRA_STATE = "_extra_state"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor | None]],
    root_rank: int,
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrite every parameter with the root's; collective.

    Results of `get_extra_state` in a state_dict are broadcast if they are tensors, and otherwise
    left unchanged. Of expanded tensors, only the part in memory is broadcast.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()` or a list of
            tensors, with the same names, shapes and dtypes on every rank. None is skipped.
        root_rank: The root's global rank.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError, ValueError: On every rank, if an entry on any rank is not a tensor or cannot be
            sent; raised before anything is overwritten.
        CollectiveMismatchError: On every rank, if names, shapes, dtypes or kinds of devices differ;
            the text names the first such entry. Raised before anything is overwritten.

    Examples:
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    group, root = group_and_root(process_set, root_rank)
    ranks = (process_set or global_process_set).ranks
    entries = agreed(group, ranks, "broadcast_parameters", lambda: _entries_of(params))
    _broadcast_entries(entries, group, root)


def _entries_of(params: Any) -> list[Entry]:
    named: list[Any] = []
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                raise TypeError(f"params must have names as keys, got {name!r}")
        named = sorted(params.items())
    elif isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        text = f"params must be a dict or a list, got {type(params).__name__}"
        if isinstance(params, torch.nn.Module):
            text += ": pass its state_dict()"
        elif isinstance(params, torch.optim.Optimizer):
            text += ": use broadcast_optimizer_state"
        raise TypeError(text)
    else:
        for i, entry in enumerate(params):
            pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
            named.append(entry if pair else (f"parameter {i}", entry))
        if isinstance(params, Iterator) and not named:
            raise ValueError(
                "params has no tensors: an iterator such as model.parameters() has been used up"
            )
    entries = []
    for name, value in named:
        argument = f"params[{name!r}]"
        if isinstance(value, Tensor):
            entries.append(entry_of(name, argument, value))
        elif value is not None and not name.endswith(_EXTRA_STATE):
            raise TypeError(f"{argument} must be a tensor, got {type(value).__name__}")
    return entries


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Give every rank the state and hyperparameters of the root's optimizer; collective.

    Some ranks may have no state yet, the root or the others. Tensors keep the root's dtype. They
    are put on the device of their parameter, or on the CPU if the root's tensor is on the CPU.

    Args:
        optimizer: Must have parameter groups of the same lengths on every rank.
        root_rank: The root's global rank.
        model: Ignored; for compatibility with Horovod.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError, ValueError: On every rank, if `optimizer` is not a torch.optim.Optimizer on any
            rank, parameter groups differ in number or length, or the root's state cannot be sent.

    Examples:
        >>> hvd.init()
        >>> optimizer = torch.optim.SGD([torch.ones(2)], lr=0.1)
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    group, root = group_and_root(process_set, root_rank)
    _check_parameter_groups(optimizer, root_rank, process_set)
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    tensors = _Tensors(parameters[0].device if parameters else torch.device("cpu"))
    # Only with mode="owners", which spreads the state over the ranks.
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if consolidate is not None:
        consolidate(to=root)
    is_root = group.rank == root
    sent: Any = None
    if is_root:
        try:
            sent = [_map_tensors(tensors.take_out, optimizer.state_dict()), tensors.devices, ""]
        except (TypeError, ValueError) as error:
            sent = [None, [], str(error)]
    try:
        received, tensors.devices, problem = broadcast_object(sent, root_rank, None, process_set)
    except TypeError as error:
        raise TypeError(f"optimizer.state_dict() cannot be broadcast: {error}") from None
    if problem:
        raise TypeError(f"rank {root_rank}: {problem}")
    if not is_root:
        received = _map_tensors(tensors.allocate, received)
    _broadcast_entries(tensors.entries, group, root)
    if is_root:
        return
    # load_state_dict casts state to the parameter's dtype, and rebuilds iterables such as strings
    # and arrays from their items. So it gets tensors and numbers only; the root's state follows.
    optimizer.load_state_dict(
        {**received, "state": dict(map(_castable, received["state"].items()))}
    )
    for index, state in received["state"].items():
        # Keys may be strings, and the optimizer may keep only this rank's part.
        if isinstance(index, int) and parameters[index] in optimizer.state:
            move = partial(_move, parameters[index].device)
            optimizer.state[parameters[index]] = _map_tensors(move, state)


def _castable(entry: tuple[Any, Any]) -> tuple[Any, Any]:
    index, state = entry
    if isinstance(index, int) and isinstance(state, dict):
        state = {key: each for key, each in state.items() if isinstance(each, Tensor | float | int)}
    return index, state


class _Tensors:
    """The tensors of a state_dict, to be sent one by one, and their device types at the root."""

    def __init__(self, device: torch.device) -> None:
        self.entries: list[Entry] = []
        self.devices: list[str] = []
        self._device = device

    def take_out(self, tensor: Tensor, path: str) -> Tensor:
        """Note the root's tensor; return a meta tensor to replace it in the state_dict."""
        entry = entry_of(f"state {len(self.entries)}", path, tensor)
        # The tensors of the receiving ranks are not expanded.
        self.entries.append(entry._replace(sent=entry.sent.expand(tensor.shape).contiguous()))
        self.devices.append(tensor.device.type)
        return tensor.detach().resolve_conj().resolve_neg().to("meta")

    def allocate(self, like: Tensor, path: str) -> Tensor:
        """Allocate memory to receive the root's tensor, described by a meta tensor."""
        device = "cpu" if self.devices[len(self.entries)] == "cpu" else self._device
        tensor = torch.empty_like(like, device=device)
        self.entries.append(entry_of(f"state {len(self.entries)}", path, tensor))
        return tensor


def _move(device: torch.device, tensor: Tensor, path: str) -> Tensor:
    return tensor if tensor.is_cpu else tensor.to(device)


def _check_parameter_groups(
    optimizer: object, root_rank: int, process_set: ProcessSet | None
) -> None:
    lengths: list[int] = []
    problem = f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
    if isinstance(optimizer, torch.optim.Optimizer):
        lengths, problem = [len(each["params"]) for each in optimizer.param_groups], ""
    # The answer includes the rank, because ranks that have joined do not answer.
    mine = default_group().rank, lengths, problem
    answers = allgather_object(mine, process_set=process_set)
    by_rank = {rank: others for rank, others, _ in answers}
    for rank, others, problem in answers:
        if problem:
            raise TypeError(f"rank {rank}: {problem}")
        if others != by_rank.get(root_rank, others):
            raise ValueError(
                f"the optimizer has parameter groups of {by_rank[root_rank]} parameters on rank "
                f"{root_rank} and of {others} on rank {rank}"
            )


def _broadcast_entries(entries: Sequence[Entry], group: Group, root: int) -> None:
    works: list[Work[Tensor]] = [
        group.broadcast(entry.sent, root=root, name=entry.name, async_op=True) for entry in entries
    ]
    for work, entry in zip(works, entries, strict=True):
        work.wait()
        if group.rank != root:
            entry.store()


def _map_tensors(
    function: Callable[[Tensor, str], Tensor], value: Any, path: str = "optimizer.state_dict()"
) -> Any:
    """Return a copy of nested lists and dicts with function(tensor, path) in each tensor's place.

    path: the value's name in error texts.
    """
    if isinstance(value, Tensor):
        return function(value, path)
    if isinstance(value, dict):
        return {
            key: _map_tensors(function, item, f"{path}[{key!r}]") for key, item in value.items()
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A namedtuple.
        return type(value)(*_map_tensors(function, list(value), path))
    if isinstance(value, list | tuple):
        items = (_map_tensors(function, item, f"{path}[{i}]") for i, item in enumerate(value))
        return type(value)(items)
    return value
