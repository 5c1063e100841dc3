"""Horovod's functions that give all ranks the root's parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasum.horovod.objects import allgather_object, broadcast_object
from adasum.horovod.process_sets import ProcessSet, group_and_root
from collectives import Group, validation


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor | None]],
    root_rank: int,
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrite every parameter with that of the root; collective.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()` or a list of
            tensors, with the same names, shapes and dtypes on every rank. None is skipped.
        root_rank: The root's global rank.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: An entry is not a tensor; raised before anything is sent.
    """
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items())
    elif isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a dict or a list, not {type(params).__name__}")
    else:
        entries = [
            entry if isinstance(entry, tuple) and len(entry) == 2 else (f"parameter {i}", entry)
            for i, entry in enumerate(params)
        ]
    for name, value in entries:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"params[{name!r}] must be a tensor, not {type(value).__name__}")
    tensors = [(name, value) for name, value in entries if value is not None]
    _broadcast_tensors(tensors, *group_and_root(process_set, root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Give every rank the state and hyperparameters of the root's optimizer; collective.

    Works where only the root has state (it loaded a checkpoint), and where only others have.
    Tensors keep the root's dtype, and are put on the device of their parameter, or on the CPU where
    the root's are.

    Args:
        optimizer: Has parameter groups of the same lengths on every rank.
        root_rank: The root's global rank.
        model: Ignored; Horovod has it.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: `optimizer` is not a torch.optim.Optimizer.
        ValueError: On every rank, where the ranks' parameter groups differ in number or length.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    validation.no_mode("optimizer's state")
    _map_tensors(partial(_checked, "a tensor of optimizer's state"), optimizer.state_dict())
    group, root = group_and_root(process_set, root_rank)
    _check_parameter_groups(optimizer, group, root, process_set)
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    tensors: list[Tensor] = []
    devices: list[str] = []

    def take_out(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        devices.append(tensor.device.type)
        return tensor.to("meta")

    def allocate(like: Tensor) -> Tensor:
        device = "cpu" if devices[len(tensors)] == "cpu" else parameters[0].device
        tensors.append(torch.empty_like(like, device=device))
        return tensors[-1]

    # The optimizer of mode="owners", whose state is spread over the ranks.
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if consolidate is not None:
        consolidate(to=root)
    is_root = group.rank == root
    sent = [_map_tensors(take_out, optimizer.state_dict()), devices] if is_root else None
    received, devices = broadcast_object(sent, root_rank, None, process_set)
    if not is_root:
        received = _map_tensors(allocate, received)
    _broadcast_tensors([(f"state {i}", tensor) for i, tensor in enumerate(tensors)], group, root)
    if is_root:
        return
    optimizer.load_state_dict(received)
    # load_state_dict casts state to the parameter's dtype, and the root's bits are wanted.
    for index, state in received["state"].items():
        # It may have kept no more than this rank's part.
        if parameters[index] in optimizer.state:
            move = partial(_move, parameters[index].device)
            optimizer.state[parameters[index]] = _map_tensors(move, state)


def _checked(argument: str, tensor: Tensor) -> Tensor:
    validation.plain(argument, tensor)
    return tensor


def _move(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cpu else tensor.to(device)


def _check_parameter_groups(
    optimizer: torch.optim.Optimizer, group: Group, root: int, process_set: ProcessSet | None
) -> None:
    mine = [len(each["params"]) for each in optimizer.param_groups]
    # With the rank beside it, because ranks that have joined answer nothing.
    lengths = dict(allgather_object((group.rank, mine), process_set=process_set))
    for rank, other in lengths.items():
        if other != lengths.get(root, other):
            raise ValueError(
                f"the optimizer has parameter groups of {lengths[root]} parameters on rank "
                f"{group.ranks[root]} and of {other} on rank {group.ranks[rank]}"
            )


def _broadcast_tensors(entries: list[tuple[str, Tensor]], group: Group, root: int) -> None:
    started = []
    for name, tensor in entries:
        target = tensor.detach()
        dense = target.contiguous()
        work: Any = group.broadcast(dense, root=root, name=name, async_op=True)
        started.append((work, target, dense))
    for work, target, dense in started:
        work.wait()
        if dense is not target:
            target.copy_(dense)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of nested lists and dicts with function(tensor) in the place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    if isinstance(value, np.generic):  # a rate that a schedule computed with numpy
        return value.item()
    return value
