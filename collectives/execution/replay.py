"""Requests on GPUs, captured in a CUDA graph and launched whole from then on.

A start costs the host a post for every step and a launch for every kernel, a millisecond or two,
and puts the same work on the stream each time. As a graph it is one launch.

Whether an operation of NCCL's is captured must be the same on all of its ranks, and a graph may be
launched only together with those that the other ranks captured at the same time (NCCL's user guide,
"Using NCCL with CUDA Graphs"). So each rank says in the negotiation of a start how far it is, and
all do what the least of them can.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from collectives.errors import CollectiveError
from collectives.execution.all_reduce import Runner
from collectives.execution.call import Call, RequestReplay

# How far a rank is: its host puts the work on the stream; it does so once more, and captures it; it
# launches what it has captured.
NEW, SEEN, CAPTURED = range(3)
# Starts at which this rank was ready to capture and another one was not, until it no longer asks.
_PATIENCE = 8
_VARIABLE = "ADASUM_CUDA_GRAPHS"
_logger = logging.getLogger(__name__)


@functools.cache
def enabled() -> bool:
    """Return whether requests may be captured: ADASUM_CUDA_GRAPHS, read once, is not 0.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    text = os.environ.get(_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


class Replay:
    """How far one rank is with a request on these buffers.

    Attributes:
        addresses: Of the request's buffers.
        stage: NEW, SEEN or CAPTURED.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self.stage = NEW
        self.addresses = addresses
        self._launch: Callable[[str, float], None] | None = None
        self._left = _PATIENCE

    def start(self, runner: Runner, call: Call, stage: int, work: Callable[[], Any]) -> Any:
        """Carry out a start, and return its result.

        Args:
            runner: The rank's.
            call: The request's call.
            stage: The least of all ranks' stages.
            work: What carries the call out, a step after the other.
        """
        if stage == CAPTURED:
            assert self._launch is not None
            self._launch(call.label, runner.timeout)
            return call.tensors if call.kind == "grouped_all_reduce" else call.tensors[0]
        result = work()
        if stage == SEEN:
            self._capture(runner, work)
        elif self.stage == NEW and self._left:
            self.stage = SEEN
        elif self.stage == SEEN:
            self._left -= 1
            self.stage = SEEN if self._left else NEW
        return result

    def _capture(self, runner: Runner, work: Callable[[], Any]) -> None:
        """Capture the work; where that fails the request stays with what the host puts."""
        try:
            self._launch = runner.transport.capture(work)
            self.stage = CAPTURED
        except CollectiveError:
            raise
        except RuntimeError as error:
            self._launch, self.stage, self._left = None, NEW, 0
            _logger.warning(
                "a request was not captured in a CUDA graph, and costs the host more: %s", error
            )

    @staticmethod
    def of(runner: Runner, call: Call) -> RequestReplay | None:
        """Return the call's, a new one where its buffers are others; None where there is none."""
        addresses = tuple(map(Tensor.data_ptr, call.memory))
        known = call.replay
        if known is not None and known.addresses == addresses:
            return known
        if not (enabled() and runner.replays(call)):
            return None
        return Replay(addresses)
