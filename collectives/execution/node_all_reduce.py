"""All-reduces of tensors in memory that the GPUs of a node share: one launch a rank.

No message is sent. Each rank's kernel reads its slice straight from all GPUs' memory, and writes
what it has reduced to all of them (`kernels.gpu.node_kernels`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collectives.call import Call
from collectives.execution.all_reduce import AllReduceOptions, Runner, call_span
from collectives.execution.vectors import Vector, multiply, vector_of
from collectives.schedules.spec import spec_for
from kernels.gpu.launcher import elsewhere

# Where in the memory that the ranks share a call's tensor lies; ranks compare it.
OPTION = "symmetric_memory"


def by_messages(call: Call) -> Call:
    """Return a call that goes by messages whatever was planned, as another one to the ranks."""
    options = {key: value for key, value in call.options.items() if key != OPTION}
    return replace(call, options=options, plan=None)


def plan_node_all_reduce(runner: Runner, call: Call) -> NodeAllReduce | None:
    """Return how a call runs in one launch; None where it goes by messages.

    That is where `auto` is free to choose, an operator has such a kernel for the dtype, and the
    tensor, or the FusedBuffer of several, lies in the group's symmetric memory: then the call's
    options say where.
    """
    if not runner.transport.node_memories or call.kind not in ("all_reduce", "grouped_all_reduce"):
        return None
    # A request's buffer may be another one now.
    call.options = {key: value for key, value in call.options.items() if key != OPTION}
    options = AllReduceOptions.of(call)
    vector = _vector_of(call, options)
    if vector is None:
        return None
    (flat,) = vector.tensors
    # Tables cannot be uploaded in a capture of the caller's, which is one on all ranks.
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    for number, memory in enumerate(runner.transport.node_memories):
        offset = memory.offset_of(flat)
        if offset is None:
            continue
        # Triton compiles and launches for the current device, which may be another one.
        with elsewhere(flat) or nullcontext():
            launch = call.op.bind_on_node(memory.node, flat, offset, vector.segments)
        if launch is None:
            return None
        call.options = {**call.options, OPTION: [number, offset]}
        # What the launch reads was put on this stream.
        bound = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        return NodeAllReduce(runner, vector, options, number, launch, bound)
    return None


def _vector_of(call: Call, options: AllReduceOptions) -> Vector | None:
    """Return a call's tensors as the one vector that they are in memory; None where they are not.

    None as well where an algorithm other than `auto` takes them.
    """
    tensors = call.tensors
    if not any(map(Tensor.numel, tensors)) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    ranges = options.by_range(tensors)
    if len(ranges) > 1:
        return None
    vector = vector_of(tensors, options.segments)
    if vector is None or vector.layout is not None:
        return None
    ((options, _),) = ranges
    return vector if spec_for(options.specs, vector.numel).outer == "auto" else None


@dataclass(eq=False)
class NodeAllReduce:
    """One all-reduce of one rank's vector; it may be run any number of times.

    Attributes:
        vector: What is reduced, one tensor in the memory of this number.
        launch: What reduces it in place, on the current stream.
        bound: The event after which it may; None once that was waited for.
    """

    runner: Runner
    vector: Vector
    options: AllReduceOptions
    number: int
    launch: Callable[[], None]
    bound: torch.cuda.Event | None = None

    # Nothing is copied: the launch reads the vectors where they are.
    nbytes = sys.maxsize
    by_tree = False

    def __str__(self) -> str:
        return "one launch"

    def fill(self) -> None:
        """Do nothing: the vector lies in the memory that is shared."""

    def run(self, call: Call) -> None:
        """Put the call on the stream."""
        (flat,), runner, options = self.vector.tensors, self.runner, self.options
        if self.bound is not None:
            torch.cuda.current_stream(flat.device).wait_event(self.bound)
            self.bound = None
        with call_span(call.label, call.op, "one launch", flat):
            self.vector.fill(flat, options.prescale)
            runner.transport.launch(self.number, self.launch, flat, call.label, runner.timeout)
            multiply(flat, options.postscale)
