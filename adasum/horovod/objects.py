"""Horovod's functions that send Python objects between ranks.

Objects are written by `torch.save` and read with `weights_only=True`: tensors, numbers, strings,
None, and lists, tuples, sets and dicts of these. Nothing else is unpickled, so a received object
cannot run code.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from adasum.horovod.process_sets import ProcessSet, group_and_root, require_group


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the root's object on every rank; collective.

    Args:
        obj: What the root sends; ignored on the other ranks, where tensors in it arrive on the CPU.
        root_rank: The root's global rank.
        name: Names the collectives in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: On every rank, where the root's object cannot be sent (see the module).
    """
    group, root = group_and_root(process_set, root_rank)
    name = _name(name)
    is_root = group.rank == root
    ok, payload = _encode(obj) if is_root else (True, b"")
    header = torch.tensor([ok, len(payload)], dtype=torch.int64, device="cpu")
    group.broadcast(header, root=root, name=f"{name}: length")
    # bytearray: torch wants memory that can be written to, and at least one byte of it.
    buffer = bytearray(payload) if is_root else bytearray(int(header[1]))
    if buffer:
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        group.broadcast(content, root=root, name=f"{name}: content")
    if not header[0]:
        raise TypeError(f"rank {root_rank}: {buffer.decode()}")
    return obj if is_root else _decode(bytes(buffer))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Return every rank's object, in rank order, on every rank; collective.

    Args:
        obj: What this rank sends; tensors in it arrive on the CPU.
        name: Names the collective in errors; equal on all ranks.
        process_set: The ranks that take part; all ranks unless given.

    Raises:
        TypeError: On every rank, where one rank's object cannot be sent (see the module).
    """
    group = require_group(process_set)
    ok, payload = _encode(obj)
    results = group.all_gather_bytes(bytes([ok]) + payload, name=_name(name))
    # A rank that has joined sends nothing at all.
    sent = [(rank, result) for rank, result in enumerate(results) if result]
    for rank, result in sent:
        if not result[0]:
            raise TypeError(f"rank {rank}: {result[1:].decode()}")
    return [_decode(result[1:]) for _, result in sent]


def _name(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    return name or "object"


def _encode(obj: Any) -> tuple[bool, bytes]:
    """Return (True, the object's bytes), or (False, why it cannot be sent)."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        payload = buffer.getvalue()
        # What is refused when it is read has to be refused here, on all ranks.
        _decode(payload)
    # Pickling a foreign class may raise anything, and every rank must be told.
    except Exception as error:  # noqa: BLE001
        lines = str(error).splitlines() or [""]
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        return False, (
            f"an object of {type(obj).__name__} cannot be sent: only tensors, Python's numbers, "
            "strings, None and lists, tuples, sets and dicts of these can "
            f"({type(error).__name__}: {reason})"
        ).encode()
    return True, payload


def _decode(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
