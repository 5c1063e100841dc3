"""The same parameters, optimizer state and objects on every rank.

Objects travel as `torch.save` writes them and are read with `weights_only=True`: tensors, numbers,
strings, None and lists, tuples, sets and dicts of these. Nothing else is unpickled.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasum.horovod.process_sets import ProcessSet, members_of, root_of
from collectives import Group
from collectives.execution.gathering import as_tensor

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Tensor | tuple[str, Tensor | None]],
    root_rank: int,
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrites every parameter with that of `root_rank`, a global rank; collective.

    params: model.state_dict(), model.named_parameters(), model.parameters() or a list of tensors,
    with the same names, shapes and dtypes on every rank. None is passed over.
    TypeError naming the entry that is no tensor, before anything is sent.
    """
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items())
    elif isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a dict or a list, not {type(params).__name__}")
    else:
        entries = [
            entry if isinstance(entry, tuple) else (f"parameter {i}", entry)
            for i, entry in enumerate(params)
        ]
    for name, value in entries:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"params[{name!r}] must be a tensor, not {type(value).__name__}")
    tensors = [(name, value) for name, value in entries if value is not None]
    _broadcast_tensors(tensors, *_place(process_set, root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Gives every rank the state and the hyperparameters of `root_rank`'s optimizer; collective.

    Works when only the root has state (resumed from a checkpoint) or only others have. Tensors keep
    the root's dtype, and lie on the device of their parameter (on the CPU where the root's do).
    model: not needed; Horovod has it.
    ValueError on every rank when the ranks' parameter groups differ in number or length.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    group, root = _place(process_set, root_rank)
    mine = [len(each["params"]) for each in optimizer.param_groups]
    # With their ranks: those that have joined answer nothing.
    lengths = dict(allgather_object((group.rank, mine), process_set=process_set))
    for rank, other in lengths.items():
        if other != lengths.get(root, other):
            raise ValueError(
                f"the optimizer has parameter groups of {lengths[root]} parameters on rank "
                f"{root} and of {other} on rank {rank}"
            )
    at_root = group.rank == root
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    tensors: list[Tensor] = []
    skeleton = _take_out(optimizer.state_dict(), tensors) if at_root else None
    shapes = [(list(t.shape), str(t.dtype), t.device.type) for t in tensors]
    skeleton, shapes = broadcast_object([skeleton, shapes], root_rank, None, process_set)
    if not at_root:
        owners = _owners(skeleton["state"])
        tensors = [
            torch.empty(
                shape,
                dtype=getattr(torch, dtype.removeprefix("torch.")),
                device="cpu" if device == "cpu" else parameters[owners.get(i, 0)].device,
            )
            for i, (shape, dtype, device) in enumerate(shapes)
        ]
    _broadcast_tensors([(f"state {i}", tensor) for i, tensor in enumerate(tensors)], group, root)
    if not at_root:
        received = _put_back(skeleton, tensors)
        optimizer.load_state_dict(received)
        # load_state_dict casts state to the parameter's dtype; the root's own bits are wanted.
        for index, state in received["state"].items():
            optimizer.state[parameters[index]] = state


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """The root's object, on every rank; tensors in it arrive on the CPU. Collective.

    root_rank: a global rank.
    TypeError on every rank when the root's object holds more than the safe kinds (see the module).
    """
    group, root = _place(process_set, root_rank)
    name = _name(name)
    at_root = group.rank == root
    ok, payload = _encode(obj) if at_root else (True, b"")
    header = torch.tensor([ok, len(payload)], dtype=torch.int64, device="cpu")
    group.broadcast(header, root=root, name=f"{name}: length")
    ok, length = bool(header[0]), int(header[1])
    content = (
        as_tensor(payload) if at_root else torch.empty(length, dtype=torch.uint8, device="cpu")
    )
    group.broadcast(content, root=root, name=f"{name}: content")
    if not ok:
        raise TypeError(f"rank {root_rank}: {_to_bytes(content).decode()}")
    return obj if at_root else _decode(_to_bytes(content))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Every rank's object, in rank order, on every rank; tensors arrive on the CPU. Collective.

    TypeError on every rank when one rank's object holds more than the safe kinds.
    """
    group = members_of(process_set)
    name = _name(name)
    ok, payload = _encode(obj)
    header = torch.tensor([[ok, len(payload)]], dtype=torch.int64, device="cpu")
    gathered: Any = group.all_gather(header, name=f"{name}: lengths")
    headers = gathered.tolist()
    gathered = group.all_gather(as_tensor(payload), name=f"{name}: contents")
    contents = _to_bytes(gathered)
    pieces = []
    for _, length in headers:
        pieces.append(contents[:length])
        contents = contents[length:]
    for rank, (good, _) in enumerate(headers):
        if not good:
            raise TypeError(f"rank {rank}: {pieces[rank].decode()}")
    return [_decode(piece) for piece in pieces]


def _name(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    return name or "object"


def _place(process_set: ProcessSet | None, root_rank: int) -> tuple[Group, int]:
    """The group of the set, and the number of the root in it."""
    group, root = members_of(process_set), root_of(process_set, root_rank)
    if not 0 <= root < group.size:
        raise ValueError(f"root_rank must be in 0..{group.size - 1}, not {root_rank}")
    return group, root


def _broadcast_tensors(entries: list[tuple[str, Tensor]], group: Group, root: int) -> None:
    under_way = []
    for name, tensor in entries:
        target = tensor.detach()
        dense = target.contiguous()
        work: Any = group.broadcast(dense, root=root, name=name, async_op=True)
        under_way.append((work, target, dense))
    for work, target, dense in under_way:
        work.wait()
        if dense is not target:
            target.copy_(dense)


def _encode(obj: Any) -> tuple[bool, bytes]:
    """(True, the object's bytes), or (False, why it cannot travel): read back to be sure."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        payload = buffer.getvalue()
        _decode(payload)
    # A foreign class raises what it likes when pickled, and every rank must be told.
    except Exception as error:  # noqa: BLE001
        lines = str(error).splitlines() or [""]
        # Of torch's many lines the one that names what is in the way.
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        return False, (
            f"an object of {type(obj).__name__} cannot be sent: only tensors, Python's numbers, "
            "strings, None and lists, tuples, sets and dicts of these can "
            f"({type(error).__name__}: {reason})"
        ).encode()
    return True, payload


def _decode(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


# Stands, in a dict of its own, where a tensor was taken out of a state_dict.
_MARK = "__adasum_tensor__"


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_MARK: len(tensors) - 1}
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    if isinstance(value, np.generic):  # a rate that a schedule made with numpy
        return value.item()
    return value


def _put_back(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        if _MARK in value:
            return tensors[value[_MARK]]
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


def _owners(state: Any) -> dict[int, int]:
    """Which parameter the state's tensors belong to, by the tensor's number."""
    owners: dict[int, int] = {}

    def walk(value: Any, index: int) -> None:
        if isinstance(value, dict):
            if _MARK in value:
                owners[value[_MARK]] = index
            for item in value.values():
                walk(item, index)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item, index)

    for index, each in state.items():
        walk(each, index)
    return owners
