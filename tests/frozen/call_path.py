"""Trace a call of two ranks: which of our functions it goes through, in the order of their calls.

    python -m tests.frozen --trace

prints them, of an all_reduce of 1 MiB over gloo and in shared memory, which test_call_path.py holds
to the tables of docs/architecture.md and to a number. Ranks are processes, made as users make them;
all threads of rank 0 are traced.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import collectives
from tests.processes.harness import run_ranks

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("kernels", "collectives", "adasum"))
WARM = 5
# Of as many calls the one with the least waiting in it counts.
TURNS = 50


class Hop(NamedTuple):
    """A function of the way.

    Attributes:
        file: Relative to the repository.
        function: As "Class.method".
    """

    file: str
    function: str


def hop_of(code: CodeType) -> Hop:
    """Name a function as a reader does."""
    # Before Python 3.11 a code object does not know its class.
    name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    return Hop(str(Path(code.co_filename).relative_to(ROOT)), name)


def _is_counted(code: CodeType) -> bool:
    """Whether it is ours; not `untraced`'s wrapper, as torch.compiler.disable's is not."""
    wraps = code.co_filename.endswith("collectives/modes.py") and code.co_name == "call"
    return code.co_filename.startswith(OURS) and not wraps


def _all_reduce(rank: int, transport: str) -> list[Hop]:
    """What rank 0 calls: a trace takes time, so that it is the others that wait for this one."""
    calls: list[list[Hop]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if calls and event == "call" and _is_counted(frame.f_code):
            calls[-1].append(hop_of(frame.f_code))

    if rank == 0:
        threading.setprofile(note)
    # By size alone: measured rates may choose another algorithm on another machine.
    group = collectives.init(transport=transport)
    tensor = torch.ones(1 << 18)
    for turn in range(WARM + TURNS):
        if rank == 0 and turn >= WARM:
            calls.append([])
            sys.setprofile(note)
        group.all_reduce(tensor, collectives.Sum)
        sys.setprofile(None)
    collectives.shutdown()
    return min(calls, key=len, default=[])


@cache
def all_reduce(transport: str) -> list[Hop]:
    """1 MiB of float32 over 2 ranks, Sum, as rank 0 sees it."""
    return run_ranks(2, _all_reduce, transport)[0]


def show() -> None:
    """Print all functions in the order of their first calls."""
    for transport in ("gloo", "shm"):
        calls = all_reduce(transport)
        print(f"all_reduce over {transport}: {len(calls)} calls")
        print("\n".join(f"{hop.file} | {hop.function}" for hop in dict.fromkeys(calls)), end="\n\n")
