"""All-reduces through memory that a node's GPUs share, in launches of our kernels.

On one node an all-reduce is one launch a rank: its kernel reads its slice straight from all GPUs'
memory, and writes what it has reduced to all of them (`kernels.gpu.node_kernels`). On several the
launch leaves each rank its slice, which is reduced across the nodes by messages; a second launch
writes it to the node's GPUs. A vector that does not lie in memory that they share is copied there
before, and back behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from collectives.call import Call
from collectives.execution.all_reduce import AllReduceOptions, Runner, call_span
from collectives.execution.executor import execute
from collectives.execution.phases import auto_of, for_dtype
from collectives.execution.vectors import Vector
from collectives.reducers import Reducer, Sum, is_plain_sum
from collectives.schedules.levels import across_nodes, runs_on_nodes, schedule_of
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.spec import parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology
from kernels.gpu.launcher import elsewhere
from kernels.gpu.node_slices import slice_of

Tensor = torch.Tensor
# Where in the memory that GPUs share a call's tensor lies; ranks compare it.
OPTION = "symmetric_memory"
# Between two nodes it sends no more than others, in one step.
_BETWEEN_TWO = parse_all_reduce_spec("rd")[0]


def by_messages(call: Call) -> Call:
    """Return a call that goes by messages whatever was planned, as another one to the ranks."""
    options = {key: value for key, value in call.options.items() if key != OPTION}
    return replace(call, options=options, plan=None)


def plan_node_all_reduce(runner: Runner, call: Call) -> NodeAllReduce | None:
    """Return how a call runs in launches; None if it goes by messages.

    It is launched if `auto` is free to choose and an operator has such a kernel for the dtype.
    Where the vector lies in memory that `symmetric_empty` has made, the call's options say where;
    else it is copied to the group's own, and back.
    """
    tensors, transport = call.tensors, runner.transport
    if call.kind not in ("all_reduce", "grouped_all_reduce") or not tensors:
        return None
    device = tensors[0].device
    if not transport.shares_gpu_memory(device):
        return None
    # A request's buffer may be another one now.
    call.set_option(OPTION, None)
    options = AllReduceOptions.of(call)
    if not any(map(Tensor.numel, tensors)) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    options, vector = options.as_vector(tensors)
    if vector is None or not runs_on_nodes(call.op, vector.dtype, runner.topology):
        return None
    if spec_for(options.specs, vector.numel).outer != "auto":
        return None
    flat = vector.tensors[0]
    # Tables cannot be uploaded in a capture of the caller's, which is one on all ranks.
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    plan = NodeAllReduce(runner, vector, options)
    for number, memory in enumerate(transport.node_memories if vector.layout is None else ()):
        offset = memory.offset_of(flat)
        if offset is not None:
            call.set_option(OPTION, [number, offset])
            plan.place = number, offset
            return plan
    return plan if vector.nbytes <= runner.staging_bytes and not plan.by_messages else None


@dataclass(eq=False)
class NodeAllReduce:
    """One all-reduce of one rank's vector; it may be run any number of times.

    Attributes:
        vector: What is reduced.
        place: The number of the memory, and the bytes at which the vector lies or is copied there;
            None until that is made.
    """

    runner: Runner
    vector: Vector
    options: AllReduceOptions
    place: tuple[int, int] | None = None

    # Nothing is copied by the caller.
    nbytes = sys.maxsize
    by_tree = False

    def __str__(self) -> str:
        nodes = self.runner.topology.num_nodes
        return "one launch" if nodes == 1 else f"launches on {nodes} nodes"

    @property
    def by_messages(self) -> bool:
        """Whether it is known that the ranks have no memory to copy the vector to."""
        device = self.vector.tensors[0].device
        return self.place is None and self.runner.staging.get(device, 0) is None

    def ready(self) -> bool:
        """Return whether it can run, alike on all ranks; the first one makes the memory."""
        if self.place is None:
            runner, device = self.runner, self.vector.tensors[0].device
            if device not in runner.staging:
                runner.staging[device] = runner.try_node_memory(runner.staging_bytes, device)
            number = runner.staging[device]
            self.place = None if number is None else (number, 0)
        return self.place is not None

    def fill(self) -> None:
        """Do nothing: the launch is behind the copy on the stream."""

    def run(self, call: Call) -> None:
        """Put the call on the stream."""
        assert self.place is not None
        vector, launches = self.vector, call.launches
        if not isinstance(launches, Launches) or not launches.serve(self.place, vector):
            launches = call.launches = Launches(self.runner, call.op, vector, self.place)
        with call_span(call.label, call.op, self, vector.tensors[0]):
            launches.put(vector, self.options, call.label)


class Launches:
    """What reduces vectors at one place of a node's memory, bound at the first and kept.

    It holds no tensors of the caller's: a request keeps it for other buffers.
    """

    def __init__(self, runner: Runner, op: Reducer, vector: Vector, place: tuple[int, int]) -> None:
        self._runner, self._op, self._place = runner, op, place
        self._numel, self._segments = vector.numel, vector.segments
        number, self._offset = place
        memory = runner.transport.node_memories[number]
        self._node = memory.node
        self._flat = memory.tensor[self._offset :][: vector.nbytes].view(vector.dtype)
        self._alone = runner.topology.num_nodes == 1

    def serve(self, place: tuple[int, int], vector: Vector) -> bool:
        """Return whether they reduce this vector, of the same request, at this place."""
        return (
            place == self._place
            and vector.numel == self._numel
            and vector.segments == self._segments
        )

    def put(self, vector: Vector, options: AllReduceOptions, label: str) -> None:
        """Put an all-reduce on the current stream. label: The call's, in errors."""
        flat, scale = self._flat, options.prescale
        if vector.layout is None and vector.tensors[0].data_ptr() == flat.data_ptr():
            flat = vector.tensors[0]
        if not self._alone:
            scale *= self._op.prescale(vector.dtype, self._runner.size)

        def reduce() -> None:
            vector.fill(flat, scale)
            self._reduce()
            if self._alone:
                vector.store(flat, options.postscale)

        def gather() -> None:
            self._gather()
            vector.store(flat, options.postscale)

        self._launch(reduce, vector.tensors, label)
        if not self._alone:
            self._across(label)
            self._launch(gather, vector.tensors, label)

    # Bound where they are first called, on the stream on which their memory is used, for torch's
    # allocator.
    @cached_property
    def _reduce(self) -> Callable[[], None]:
        op, node = self._op, self._node
        if not self._alone:
            # The sum of a node is no average yet.
            op, node = Sum if is_plain_sum(op) else op, node.scattering()
        return op.bind_on_node(node, self._flat, self._offset, self._segments)

    @cached_property
    def _gather(self) -> Callable[[], None]:
        return self._node.bind_gather(self._numel, self._flat.dtype, self._offset)

    def _launch(self, work: Callable[[], None], tensors: Sequence[Tensor], label: str) -> None:
        """Put launches on the current stream, as one step."""

        def put() -> None:
            # Triton compiles and launches for the current device, which may be another one.
            with elsewhere(tensors[0]) or nullcontext():
                work()

        runner = self._runner
        runner.transport.launch(self._place[0], put, tensors, label, runner.timeout)

    def _across(self, label: str) -> None:
        """Reduce this rank's slice across the nodes, by messages.

        Dot products of vectors that the ranks of a node hold together are summed in a launch.
        """
        runner, (start, length) = self._runner, self._node.slice(self._numel, self._flat.itemsize)

        def add_up(table: Tensor) -> None:
            self._launch(lambda: self._node.add_up(table), [table], label)

        context = replace(runner.context(label), sums={runner.node: add_up})
        schedule, bounds = self._schedule
        execute(schedule, self._flat, self._op, context, segments=self._segments, bounds=bounds)
        self._op.finish(self._flat[start : start + length], runner.size)

    @cached_property
    def _schedule(self) -> tuple[Schedule, list[int]]:
        """What runs across the nodes, and the boundaries of its chunks."""
        topology, flat, op = self._runner.topology, self._flat, self._op
        spec, nodes = _BETWEEN_TWO, Topology(topology.num_nodes, 1)
        if nodes.size > 2:
            nbytes = flat.nbytes // topology.local_size
            spec = for_dtype(auto_of(op, "cuda", nbytes, nodes), op, flat.dtype)
        outer = schedule_of(spec, nodes, one_tree=not op.associative)
        bounds = [0]
        for rank in range(topology.local_size):
            start, length = slice_of(flat.numel(), flat.itemsize, topology.local_size, rank)
            bounds += [start + bound for bound in split_bounds(length, outer.chunks)[1:]]
        return across_nodes(topology, outer), bounds
