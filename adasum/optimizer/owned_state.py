"""Gathering optimizer states that lie on one rank each."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import Group, validation


def gather_states(
    group: Group,
    states: Sequence[tuple[int, Mapping[str, Any]]],
    to: int | None,
    whole: Mapping[int, Any] | None,
) -> Mapping[int, Any] | None:
    """Return the states that are not empty by number, with tensors on the CPU; collective.

    Args:
        group: The ranks.
        states: The rank that has each state, and the state, of which only this rank's are read.
        to: The rank that gets them; None for all, who must have it alike.
        whole: The answer where this rank has it already. Where all have that get it, nothing is
            sent.

    Returns:
        None on the ranks that do not get them.

    Raises:
        ValueError: `to` is no rank.
        TypeError: On every rank, where a state cannot be sent.
    """
    if to is not None:
        validation.rank("to", to, group.size)
    has = group.all_gather_bytes(b"1" if whole is not None else b"0", name="states: who has them")
    wanted = range(group.size) if to is None else [to]
    if all(has[rank] == b"1" for rank in wanted):
        return whole
    gathered: dict[int, Any] = {}
    for number, (owner, state) in enumerate(states):
        received = _broadcast(group, owner, state, number)
        if received and group.rank in wanted:
            gathered[number] = torch.load(
                io.BytesIO(received), map_location="cpu", weights_only=True
            )
    return gathered if group.rank in wanted else None


def _broadcast(group: Group, owner: int, state: Mapping[str, Any], number: int) -> bytes:
    """Return the owner's state as bytes, none where it is empty."""
    sent, refusal = b"", ""
    if group.rank == owner and state:
        sent, refusal = _encode(state)
    name = f"state {number}"
    # Of the state, or below zero of why it cannot be sent.
    length = torch.tensor([-len(refusal.encode()) or len(sent)], dtype=torch.int64, device="cpu")
    group.broadcast(length, root=owner, name=f"{name}: length")
    size = int(length)
    if not size:
        return b""
    content = bytearray(sent or refusal.encode() or abs(size))
    buffer = torch.frombuffer(content, dtype=torch.uint8)
    group.broadcast(buffer, root=owner, name=f"{name}: content")
    if size < 0:
        raise TypeError(f"the state of parameter {number} on rank {owner}: {content.decode()}")
    return bytes(content)


def _encode(state: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the state's bytes, or why it cannot be sent."""
    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
        # What is refused when it is read has to be refused here, on all ranks.
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    # Pickling a foreign class may raise anything.
    except Exception as error:  # noqa: BLE001
        return b"", f"{type(error).__name__}: {error}".splitlines()[0]
    return file.getvalue(), ""
