"""All-reduces through memory that a node's GPUs share, in launches of our kernels.

On one node an all-reduce is one launch per rank: its kernel reads the rank's slice directly from
all GPUs' memory, and writes the reduced slice to all of them (`kernels.gpu.node_kernels`). On
several nodes, a first launch reduces each rank's slice within the node, messages reduce it across
the nodes, and a second launch writes it to the node's GPUs. Vectors outside of the shared memory
are copied there first, and copied back at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from collectives.call import Call
from collectives.execution.all_reduce import AllReduceOptions, Runner, call_span
from collectives.execution.executor import execute
from collectives.execution.phases import auto_of, for_dtype
from collectives.execution.vectors import Vector
from collectives.reducers import Reducer, Sum, is_plain_sum
from collectives.schedules.auto import BETWEEN_TWO_NODES
from collectives.schedules.levels import across_nodes, runs_on_nodes, schedule_of
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.spec import spec_for
from collectives.schedules.topology import Topology
from kernels.gpu.launcher import on_device_of
from kernels.gpu.node_slices import slice_of

Tensor = torch.Tensor
# The option with the place of a call's tensor in the memory that GPUs share; ranks compare it.
OPTION = "symmetric_memory"


def by_messages(call: Call) -> Call:
    """Return a copy of the call that goes by messages; ranks negotiate it as a different call."""
    options = {key: value for key, value in call.options.items() if key != OPTION}
    return replace(call, options=options, plan=None)


def plan_node_all_reduce(runner: Runner, call: Call) -> NodeAllReduce | None:
    """Return a plan to run a call in launches; None if it goes by messages.

    Calls are launched if `auto` may choose and if the operator has a kernel for the dtype. If the
    vector lies in memory of `symmetric_empty`, the call's options name the place; otherwise it is
    copied to the group's own memory, and back.
    """
    tensors, transport = call.tensors, runner.transport
    if call.kind not in ("all_reduce", "grouped_all_reduce") or not tensors:
        return None
    device = tensors[0].device
    if not transport.shares_gpu_memory(device):
        return None
    # Remove the last start's place: a request may have another buffer now.
    call.set_option(OPTION, None)
    options = AllReduceOptions.of(call)
    if not any(map(Tensor.numel, tensors)) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    options, vector = options.as_vector(tensors)
    if vector is None or not runs_on_nodes(call.op, vector.dtype, runner.topology):
        return None
    if spec_for(options.specs, vector.numel).outer != "auto":
        return None
    plan = NodeAllReduce(runner, vector, options)
    return plan if plan.locate(call) else None


@dataclass(eq=False)
class NodeAllReduce:
    """One all-reduce of one rank's vector; it may be run any number of times.

    Attributes:
        vector: The vector to reduce.
        place: The number of the memory, and the offset in bytes of the vector or its copy; None
            until the memory exists.
    """

    runner: Runner
    vector: Vector
    options: AllReduceOptions
    place: tuple[int, int] | None = None

    # So large that `Calls.start` never begins the call in the caller's thread.
    nbytes = sys.maxsize
    by_tree = False

    def __str__(self) -> str:
        nodes = self.runner.topology.num_nodes
        return "one launch" if nodes == 1 else f"launches on {nodes} nodes"

    @property
    def by_messages(self) -> bool:
        """Whether the ranks are known to have no memory for a copy of the vector."""
        device = self.vector.tensors[0].device
        return self.place is None and self.runner.staging.get(device, 0) is None

    def locate(self, call: Call) -> bool:
        """Find the vector's place and tell it to the call; False if the call goes by messages."""
        vector, runner = self.vector, self.runner
        flat, self.place = vector.tensors[0], None
        # Tables cannot be uploaded while the caller captures a graph, as all ranks then do.
        if flat.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        memories = runner.transport.node_memories if vector.layout is None else ()
        for number, memory in enumerate(memories):
            offset = memory.offset_of(flat)
            if offset is not None:
                self.place = number, offset
                break
        call.set_option(OPTION, self.place and [*self.place])
        if self.place is not None:
            return True
        return vector.nbytes <= runner.staging_bytes and not self.by_messages

    def rebind(self, call: Call) -> bool:
        """Take the call's tensor in place of the last one; False if it needs another plan."""
        return self.vector.rebind(call.tensors) and self.locate(call)

    def release(self) -> None:
        """Drop the tensors, until `rebind`."""
        self.vector.release()

    def ready(self) -> bool:
        """Return whether it can run, equal on all ranks; the first call allocates the memory."""
        if self.place is None:
            runner, device = self.runner, self.vector.tensors[0].device
            if device not in runner.staging:
                runner.staging[device] = runner.try_node_memory(runner.staging_bytes, device)
            number = runner.staging[device]
            self.place = None if number is None else (number, 0)
        return self.place is not None

    def fill(self) -> None:
        """Do nothing: `run` puts the copy on the stream, before the kernel."""

    def run(self, call: Call) -> None:
        """Put the call on the stream."""
        assert self.place is not None
        vector, launches = self.vector, call.launches
        if not isinstance(launches, Launches) or not launches.serve(self.place, vector):
            launches = call.launches = Launches(self.runner, call.op, vector, self.place)
        with call_span(call.label, call.op, self, vector.tensors[0]):
            launches.put(vector, self.options, call.label)


class Launches:
    """Bound kernels that reduce vectors at one place of a node's memory.

    It holds no tensors of the caller's, so that a request can keep it when its buffers change.
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
        """Return whether these launches fit a vector of the same request at this place."""
        return (
            place == self._place
            and vector.numel == self._numel
            and vector.segments == self._segments
        )

    def put(self, vector: Vector, options: AllReduceOptions, label: str) -> None:
        """Put an all-reduce on the current stream. label: The call's name in errors."""
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

    # Bound at their first use: torch's allocator must see the allocation of their memory on the
    # stream that uses it.
    @cached_property
    def _reduce(self) -> Callable[[], None]:
        op, node = self._op, self._node
        if not self._alone:
            # Sum within the node: an average is divided only after all nodes are added.
            op, node = Sum if is_plain_sum(op) else op, node.scattering()
        return op.bind_on_node(node, self._flat, self._offset, self._segments)

    @cached_property
    def _gather(self) -> Callable[[], None]:
        return self._node.bind_gather(self._numel, self._flat.dtype, self._offset)

    def _launch(self, work: Callable[[], None], tensors: Sequence[Tensor], label: str) -> None:
        """Put the launches of `work` on the current stream, as one step."""

        def put() -> None:
            # Triton compiles and launches for the current device, which may be another one.
            with on_device_of(tensors[0]):
                work()

        runner = self._runner
        runner.transport.launch(self._place[0], put, tensors, label, runner.timeout)

    def _across(self, label: str) -> None:
        """Reduce this rank's slice across the nodes, by messages.

        If the ranks of one node hold slices of a vector, a launch adds up their dot products.
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
        """The schedule across the nodes, and the boundaries of its chunks."""
        topology, flat, op = self._runner.topology, self._flat, self._op
        spec, nodes = BETWEEN_TWO_NODES, Topology(topology.num_nodes, 1)
        if nodes.size > 2:
            nbytes = flat.nbytes // topology.local_size
            spec = for_dtype(auto_of(op, "cuda", nbytes, nodes), op, flat.dtype)
        outer = schedule_of(spec, nodes, one_tree=not op.associative)
        bounds = [0]
        for rank in range(topology.local_size):
            start, length = slice_of(flat.numel(), flat.itemsize, topology.local_size, rank)
            bounds += [start + bound for bound in split_bounds(length, outer.chunks)[1:]]
        return across_nodes(topology, outer), bounds
