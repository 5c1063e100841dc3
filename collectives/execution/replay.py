"""Requests on GPUs, captured in a CUDA graph and launched whole from then on.

A start of a request costs the host a post for every step and a launch for every kernel, a
millisecond or two, and puts the same work on the stream each time. As a graph it is one launch.

Whether an operation of NCCL's is captured must be the same on all of its ranks, and a graph may be
launched only together with those that the other ranks captured at the same time (NCCL's user guide,
"Using NCCL with CUDA Graphs"). So each rank says in the negotiation of a start how far it is, and
all do what the least of them can.
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

# How far a rank is: its host puts the work on the stream; it does so once more, and captures it; it
# launches what it has captured, by the number of the group's capture, from CAPTURED on.
NEW, SEEN, CAPTURED = range(3)
# How many captures, and starts that other ranks were not ready for, may come between two launches;
# then the request is no more captured.
_PATIENCE = 32
# How long a caller is held, for other ranks to come and for the capture.
_HOLD_SECONDS = 0.1
_VARIABLE = "ADASUM_CUDA_GRAPHS"
_logger = logging.getLogger(__name__)


@functools.cache
def enabled() -> bool:
    """Return whether requests may be captured: ADASUM_CUDA_GRAPHS, read once, is not 0 (but 1)."""
    text = os.environ.get(_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


class Replay:
    """How far one rank is with a request on these buffers.

    While it is captured the thread that has started it must not go on: torch refuses random numbers
    on a GPU for which a graph is captured. So that thread is held, for a short time, as another
    rank may wait for what it does next; where it has gone on, nothing is captured this time.

    Attributes:
        addresses: Of the request's buffers.
        stage: NEW, SEEN, or CAPTURED and the number of the group's capture.
    """

    def __init__(self, addresses: Sequence[int], left: int = _PATIENCE) -> None:
        self.addresses = addresses
        self.stage = NEW
        self.left = left
        self._launch: Callable[[str, float], None] | None = None
        self._caller = 0
        # Whether the caller is held, and whether what it is held for is over.
        self._held, self._over = False, True
        self._changed = threading.Condition()

    def begin(self, held: bool) -> int:
        """Note the thread that is about to start; return the stage that it has to say.

        held: whether it goes on only when the start has ended on the host.
        """
        self._caller, self._held, self._over = threading.get_ident(), held, False
        return self.stage

    def hold(self) -> None:
        """Hold the calling thread until the start's capture is over, or no rank is ready for it."""
        with self._changed:
            self._held = True
            try:
                self._changed.wait_for(lambda: self._over, _HOLD_SECONDS)
            finally:
                # From here on a capture does not begin; one under way has this lock.
                self._held = False

    def start(self, runner: Runner, call: Call, least: int | None, work: Callable[[], Any]) -> Any:
        """Carry out a start, and return its result.

        least: The least of the ranks' stages; None where all are this one's. work: What carries the
        call out, a step after the other.
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
                    # All ranks that have seen it capture it at their next start, together.
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
        """Capture the work; where that fails the request stays with what the host puts."""
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
        """Return the call's, a new one where its buffers are others; None where there is none."""
        addresses = tuple(map(Tensor.data_ptr, call.memory))
        known = call.replay if isinstance(call.replay, Replay) else None
        if known is not None and known.addresses == addresses:
            return known
        if not (enabled() and runner.replays(call)):
            return None
        return Replay(addresses, _PATIENCE if known is None else known.left)
