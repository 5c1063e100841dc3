"""Horovod's functions that send Python objects between ranks.

Objects are written by `torch.save` and read with `weights_only=True`: tensors, numbers, strings,
bytes, None, lists, tuples, sets and dicts of these, and the types of `plain_types`. Nothing else is
unpickled, so a received object cannot run code.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from adasum.horovod import plain_types
from adasum.horovod.process_sets import ProcessSet, group_and_root, require_group
from collectives import Group, TransportError, validation


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the root's object on every rank; collective.

    Args:
        obj: The root's object; ignored on the other ranks, which receive its tensors on the CPU.
        root_rank: The root's global rank.
        name: Names the collectives in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: On every rank, if the root's object cannot be sent (see the module).

    Examples:
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    validation.no_mode("obj")
    group, root = group_and_root(process_set, root_rank)
    sent = encode(obj) if group.rank == root else b""
    content = broadcast_bytes(group, root, sent, _name(name))
    if not content:
        raise TransportError(f"rank {root_rank} says that its object has no bytes")
    received = decode(content, f"rank {root_rank}")
    return obj if group.rank == root else received


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Return every rank's object, in rank order, on every rank; collective.

    Args:
        obj: This rank's object; tensors in it arrive on the CPU.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: On every rank, if any rank's object cannot be sent (see the module).

    Examples:
        >>> hvd.init()
        >>> hvd.allgather_object({"loss": 0.5})
        [{'loss': 0.5}]
    """
    validation.no_mode("obj")
    group = require_group(process_set)
    results = group.all_gather_bytes(encode(obj), name=_name(name))
    # Ranks that have joined send no bytes.
    return [decode(sent, f"rank {group.ranks[i]}") for i, sent in enumerate(results) if sent]


def broadcast_bytes(group: Group, root: int, sent: bytes, name: str) -> bytes:
    """Return the root's bytes on every rank; `root` is its number in the group; collective."""
    length = torch.tensor([len(sent)], dtype=torch.int64, device="cpu")
    group.broadcast(length, root=root, name=f"{name}: length")
    if int(length) < 1:
        return b""
    # bytearray: torch wants memory that can be written to.
    content = bytearray(sent if group.rank == root else int(length))
    group.broadcast(
        torch.frombuffer(content, dtype=torch.uint8), root=root, name=f"{name}: content"
    )
    return bytes(content)


def _name(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {type(name).__name__}")
    return name or "object"


def encode(obj: Any) -> bytes:
    """Return a byte 1 and the object's bytes, or a byte 0 and the reason not to send it."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer, pickle_module=plain_types)
        payload = buffer.getvalue()
        # Check that receivers can read it, so that all ranks raise the same error otherwise.
        _decode(payload)
    # Pickling a foreign class may raise anything, and every rank must get the error.
    except Exception as error:  # noqa: BLE001
        lines = str(error).splitlines() or [""]
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        refusal = (
            f"an object of {type(obj).__name__} cannot be sent: only tensors, numbers, strings, "
            "bytes, None, NumPy's numbers and arrays, paths, dates and times, namespaces, and "
            "lists, tuples, sets, dicts and defaultdicts of these can "
            f"({type(error).__name__}: {reason})"
        )
        return b"\0" + refusal.encode()
    return b"\1" + payload


def decode(received: bytes, what: str) -> Any:
    """Return the encoded object, tensors on the CPU; raise a sent reason as TypeError."""
    if not received[0]:
        raise TypeError(f"{what}: {received[1:].decode()}")
    return _decode(received[1:])


def _decode(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
