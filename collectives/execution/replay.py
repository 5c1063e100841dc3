"""Requests on GPUs, captured in a CUDA graph and then started by one launch.

Without a graph, each start of a request costs the host one post per step and one launch per kernel,
a millisecond or two in all, and puts the same work on the stream each time.

NCCL requires that all its ranks capture an operation or none does, and that graphs captured at the
same time are launched together (NCCL's user guide, "Using NCCL with CUDA Graphs"). So each rank
states its stage in the negotiation of a start, and all ranks act on the lowest stage.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from collectives.call import Call
from collectives.errors import CollectiveError
from collectives.execution.all_reduce import Runner
from collectives.recorder import span

# A rank's stages with a request. NEW: the host puts the work on the stream. SEEN: the host does so
# once more, and then captures it. CAPTURED plus the number of the group's capture: the graph is
# launched.
NEW, SEEN, CAPTURED = range(3)
# After so many captures, or starts that other ranks were not ready for, without a launch in between
# the request is no longer captured.
_PATIENCE = 32
# Limit for holding a caller until the other ranks arrive and the capture is over.
_HOLD_SECONDS = 0.1
_VARIABLE = "ADASUM_CUDA_GRAPHS"
_logger = logging.getLogger(__name__)


@functools.cache
def enabled() -> bool:
    """Return whether requests may be captured: unless ADASUM_CUDA_GRAPHS, read once, is 0."""
    text = os.environ.get(_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


class Replay:
    """One rank's state of capturing a request on these buffers.

    During the capture the thread that started the request must not go on: torch refuses random
    numbers on a GPU while a graph is captured for it. So the thread is held, but only for a short
    time, since another rank may wait for its next actions. If it has gone on, this start is not
    captured.

    Attributes:
        addresses: The addresses of the request's buffers.
        stage: NEW, SEEN, or CAPTURED and the number of the group's capture.
    """

    def __init__(self, addresses: Sequence[int], left: int = _PATIENCE) -> None:
        self.addresses = addresses
        self.stage = NEW
        self.left = left
        self._launch: Callable[[str, float], None] | None = None
        self._caller = 0
        # Whether the caller is held, and whether the reason for that is over.
        self._held, self._over = False, True
        self._changed = threading.Condition()

    def begin(self, held: bool) -> int:
        """Note the thread of a new start; return the stage to state in the negotiation.

        held: Whether the thread goes on only after the start has ended on the host.
        """
        self._caller, self._held, self._over = threading.get_ident(), held, False
        return self.stage

    def hold(self) -> None:
        """Hold the calling thread until the start has ended on the host, for a limited time."""
        with self._changed:
            self._held = True
            try:
                self._changed.wait_for(lambda: self._over, _HOLD_SECONDS)
            finally:
                # No capture begins after this. A capture under way holds the lock, so this waits.
                self._held = False

    def start(self, runner: Runner, call: Call, least: int | None, work: Callable[[], Any]) -> Any:
        """Carry out a start, and return its result.

        least: The lowest of the ranks' stages; None if all are equal. work: A function that carries
        the call out step by step.
        """
        try:
            if least is None and call.stage >= CAPTURED:
                return self._replay(runner, call)
            result = work()
            if least is None and call.stage == SEEN:
                runner.captures += 1
                self._capture(runner, work)
            elif self.stage == NEW:
                self.stage = SEEN if self.left else NEW
            else:
                self._lose_patience()
                if least and self.stage:
                    # Ranks that have a graph drop it, to capture the next start with all others.
                    self._launch, self.stage = None, SEEN
            return result
        finally:
            with self._changed:
                self._held, self._over = False, True
                self._changed.notify_all()

    def _replay(self, runner: Runner, call: Call) -> Any:
        assert self._launch is not None
        self.left = _PATIENCE
        first, nbytes = call.tensors[0], sum(tensor.nbytes for tensor in call.tensors)
        name = f"{call.title}: {call.op}, a CUDA graph, {nbytes} B"
        with span(lambda: name, cuda=first.is_cuda):
            self._launch(call.label, runner.timeout)
        return call.tensors if call.kind == "grouped_all_reduce" else first

    def _capture(self, runner: Runner, work: Callable[[], Any]) -> None:
        """Capture the work; if that fails, the request's starts stay without a graph."""
        self._lose_patience()
        with self._changed:
            if not (self._held or self._caller == threading.get_ident()) or not self.left:
                return
            try:
                self._launch = runner.transport.capture(work)
                self.stage = CAPTURED + runner.captures
            except CollectiveError:
                raise
            except RuntimeError as error:
                self._launch, self.stage, self.left = None, NEW, 0
                _logger.warning(
                    "a request was not captured in a CUDA graph, and costs the host more: %s", error
                )

    def _lose_patience(self) -> None:
        self.left = max(self.left - 1, 0)
        if not self.left:
            self._launch, self.stage = None, NEW

    @staticmethod
    def of(runner: Runner, call: Call) -> Replay | None:
        """Return the call's Replay, a new one if its buffers have changed; None without capture."""
        addresses = tuple(map(Tensor.data_ptr, call.memory))
        known = call.replay if isinstance(call.replay, Replay) else None
        if known is not None and known.addresses == addresses:
            return known
        if not (enabled() and runner.replays(call)):
            return None
        return Replay(addresses, _PATIENCE if known is None else known.left)
