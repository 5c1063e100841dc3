"""Trace a call of two ranks: which functions it goes through, and how many there are.

    python -m tests.frozen --trace

prints the way of an all_reduce of 1 MiB to the first byte that is sent, which is the negotiation's,
file by file, and the figures that test_call_path.py holds; in shared memory, where nothing is sent,
all functions in the order of their first calls. Ranks are processes, made as users make them; all
threads of rank 0 are traced.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import adasum
import collectives
from tests.processes.harness import run_ranks

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("kernels", "collectives", "adasum"))
# What hands bytes on: the methods of a process group.
SENDS = ("send",)
WARM = 5
# Of as many calls the one with the least waiting in it counts.
TURNS = 20


class Hop(NamedTuple):
    """A function of the way.

    Attributes:
        file: Relative to the repository; "torch" and so on for another package's.
        function: As "Class.method".
    """

    file: str
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether it counts: not `untraced`'s wrapper, as torch.compiler.disable's does not."""
        wraps = self.file == "collectives/modes.py" and self.function.endswith("call")
        return not wraps and self.file.startswith(("kernels/", "collectives/", "adasum/"))


class Trace(NamedTuple):
    """What one call did.

    Attributes:
        path: The deepest stack, below the user's call, in which bytes were sent, or the function
            that was looked for was entered; others' frames among them.
        order: Our functions in the order in which they were called, in all threads.
    """

    path: list[Hop]
    order: list[Hop]

    @property
    def ours(self) -> list[Hop]:
        """The path without others' frames."""
        return [hop for hop in self.path if hop.is_ours]

    def figures(self) -> dict[str, int]:
        """What the test holds."""
        return {
            "frames": len(self.ours),
            "files": len({hop.file for hop in self.ours}),
            "calls": sum(hop.is_ours for hop in self.order),
        }


def hop_of(code: CodeType) -> Hop:
    """Name a function as a reader does."""
    # Before Python 3.11 a code object does not know its class.
    name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    file = code.co_filename
    if file.startswith(OURS):
        return Hop(str(Path(file).relative_to(ROOT)), name)
    return Hop("torch" if "/torch/" in file else Path(file).name, name)


class Tracer:
    """Follows every thread that starts while it is installed, and this one, while it is on.

    Only on one rank: a trace takes time, so that it is the others that wait for this one. Of a rank
    that waits the number of calls says how long.

    Args:
        until: Whether an event of the profiler is what the path leads to.
        here: Whether this rank is traced.
    """

    def __init__(self, until: Callable[[FrameType, str, Any], bool], *, here: bool) -> None:
        self._until = until
        self._here = here
        self._on = False
        self._path: list[Hop] = []
        self._order: list[Hop] = []
        if here:
            threading.setprofile(self._event)

    def trace(self, call: Callable[[], Any]) -> Trace:
        """Make the call and return what it did."""
        if not self._here:
            call()
            return Trace([], [])
        self._path, self._order = [], []
        sys.setprofile(self._event)
        self._on = True
        try:
            call()
        finally:
            self._on = False
            sys.setprofile(None)
        return Trace(self._path, self._order)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._on:
            return
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self._order.append(hop_of(frame.f_code))
        if event in ("call", "c_call") and self._until(frame, event, arg):
            path = [hop_of(each) for each in reversed(list(self._stack(frame)))]
            self._path = max(self._path, path, key=len)

    def _stack(self, frame: FrameType | None) -> Iterator[CodeType]:
        """From the innermost frame to the user's call, which is a function of this file."""
        while frame is not None and frame.f_code.co_filename != __file__:
            yield frame.f_code
            frame = frame.f_back


def sends(frame: FrameType, event: str, arg: Any) -> bool:
    """Whether a frame of ours hands bytes to torch's process group."""
    ours = frame.f_code.co_filename.startswith(OURS)
    return event == "c_call" and ours and getattr(arg, "__name__", "") in SENDS


def starts_request(frame: FrameType, event: str, arg: Any) -> bool:
    """Whether a request is started."""
    return event == "call" and frame.f_code is inspect.unwrap(collectives.Request.start).__code__


def _all_reduce(rank: int, transport: str) -> Trace:
    tracer = Tracer(sends, here=rank == 0)
    # By size alone: measured rates may choose another algorithm on another machine.
    group = collectives.init(transport=transport)
    tensor = torch.ones(1 << 18)
    for _ in range(WARM):
        group.all_reduce(tensor, collectives.Sum)
    traces = [tracer.trace(lambda: group.all_reduce(tensor, collectives.Sum)) for _ in range(TURNS)]
    collectives.shutdown()
    return min(traces, key=lambda trace: len(trace.order))


@cache
def all_reduce(transport: str) -> Trace:
    """1 MiB of float32 over 2 ranks, Sum, as rank 0 sees it."""
    return run_ranks(2, _all_reduce, transport)[0]


def _optimizer_step(rank: int) -> Trace:
    tracer = Tracer(starts_request, here=rank == 0)
    adasum.init()
    model = torch.nn.Linear(64, 64)
    optimizer = adasum.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    x = torch.ones(1, 64)

    def backward() -> None:
        model(x).sum().backward()

    for _ in range(WARM):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    found = tracer.trace(backward)
    optimizer.step()
    adasum.shutdown()
    return found


@cache
def gradient_hook() -> Trace:
    """From autograd's call of the optimizer's hook to the start of a bucket's request."""
    return run_ranks(2, _optimizer_step)[0]


def table(path: list[Hop]) -> str:
    """The path as a table, one function a line."""
    return "\n".join(f"{hop.file} | {hop.function}" for hop in path)


def show() -> None:
    """Print all traces."""
    for name, trace in (
        ("all_reduce over gloo", all_reduce("gloo")),
        ("all_reduce in shared memory", all_reduce("shm")),
        ("optimizer, gradient to request", gradient_hook()),
    ):
        print(f"{name}: {trace.figures()}, {len(trace.path)} frames with others'")
        print(table(trace.path or list(dict.fromkeys(trace.order))), end="\n\n")
