"""All-reduces by messages: the algorithm is chosen, and its phases run one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from collectives.call import Call
from collectives.errors import TransportError
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.execution.phases import (
    AllReducePhases,
    Libraries,
    auto_of,
    for_dtype,
    phases_of,
)
from collectives.execution.vectors import Vector, flatten, multiply, vector_of
from collectives.recorder import span
from collectives.reducers import Needs, Reducer, Sum, is_plain_sum
from collectives.schedules.algorithm import ONE_TENSOR, RoundRobin
from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.transport.nccl.cupy_backend import DTYPES
from collectives.transport.process_groups import has_nccl

if TYPE_CHECKING:
    from collectives.transport.nccl.node_memory import NodeMemory

Tensor = torch.Tensor
Specs = tuple[AllReduceSpec, ...]
AUTO = parse_all_reduce_spec("auto")
# Calls whose results are their own tensors, and whose starts all take the same number of buffers.
_REPLAYED = ("all_reduce", "grouped_all_reduce", "run")
_logger = logging.getLogger(__name__)


class AllReduceOptions(NamedTuple):
    """How to reduce: arguments of `Group`'s all-reduces; `specs` are the algorithm's ranges."""

    specs: Specs
    segments: Sequence[int] | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    packed: bool = False

    @classmethod
    def of(cls, call: Call) -> AllReduceOptions:
        """Return the options of a call; `specs` is empty if the call names no algorithm."""
        options = call.options
        text = options.get("algorithm", "")
        specs = AUTO if text == "auto" else parse_all_reduce_spec(text) if text else ()
        scales = options["prescale"], options["postscale"]
        return cls(specs, options.get("segments"), *scales, options.get("packed", False))

    def by_range(self, tensors: Sequence[Tensor]) -> list[tuple[AllReduceOptions, list[Tensor]]]:
        """Return groups of tensors to pack, each of one dtype and device, with their options.

        If ranges apply to the size of each tensor, a group holds tensors of one range only.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        if len(self.specs) == 1:
            return [(self, kind) for kind in kinds.values()]
        found = []
        for kind in kinds.values():
            ranges: dict[AllReduceSpec, list[Tensor]] = {}
            whole = sum(tensor.numel() for tensor in kind)
            for tensor in kind:
                spec = spec_for(self.specs, whole if self.packed else tensor.numel())
                ranges.setdefault(replace(spec, limit=-1), []).append(tensor)
            found += [(self._replace(specs=(spec,)), part) for spec, part in ranges.items()]
        return found

    def as_vector(self, tensors: Sequence[Tensor]) -> tuple[AllReduceOptions, Vector | None]:
        """Return (options, vector): the tensors as one vector, or None if they cannot be one."""
        options = self
        if len(tensors) > 1:
            (options, _), *others = self.by_range(tensors)
            if others:
                return self, None
        return options, vector_of(tensors, options.segments)


def staging_bytes() -> int:
    """Return ADASUM_NODE_MEMORY, read in MiB, in bytes: 128 MiB unless set; 0 for messages only."""
    text = os.environ.get("ADASUM_NODE_MEMORY") or "128"
    if not text.isdecimal():
        raise ValueError(f"ADASUM_NODE_MEMORY must be a number of MiB, got {text!r}")
    return int(text) << 20


class Runner:
    """Runs one rank's calls with its transport, memory and libraries.

    Attributes:
        staging_bytes: Larger vectors are not copied to the memory that a node's GPUs share.
    """

    def __init__(self, transport: Transport, topology: Topology, timeout: float) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.topology = topology
        self.timeout = timeout
        self.workspace = Workspace()
        self.packed = Workspace()
        self.staging_bytes = staging_bytes()
        # The number of the memory of each GPU; None if an earlier call could not allocate it.
        self.staging: dict[torch.device, int | None] = {}
        self.libraries = Libraries(transport)
        # The number of starts of requests at which all ranks were ready to capture.
        self.captures = 0
        # The first rank that the next call's shards are placed on, modulo the number of ranks.
        self.first = 0

    def check(self, specs: Specs, op: Reducer, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError or TypeError if one of the ranges cannot reduce such tensors here."""
        for spec in specs:
            if spec.outer == "auto" and is_plain_sum(op):
                continue
            kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
            on_gpu = any(device.type == "cuda" for device, _ in kinds)
            if spec.outer == "auto":
                nbytes = sum(tensor.nbytes for tensor in tensors)
                spec = auto_of(op, "cuda" if on_gpu else "cpu", nbytes, self.topology)
            phases = phases_of(spec, op, self.topology)
            if phases.host and on_gpu and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"algorithm {spec} reduces on the host, which no CUDA graph can hold: use psgpu"
                )
            if phases.library is not None:
                for device, dtype in kinds:
                    self.libraries.check(phases.library, device, dtype)

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return tuple(self.topology.ranks_of(self.topology.node_of(self.rank)))

    def add_node_memory(self, nbytes: int, device: torch.device | None) -> NodeMemory:
        """Allocate memory that the node's GPUs share: `Transport.add_node_memory`."""
        process_group = self.libraries.group(self.node, self.timeout)
        return self.transport.add_node_memory(
            nbytes, device, self.node, process_group, self.timeout
        )

    def try_node_memory(self, nbytes: int, device: torch.device) -> int | None:
        """Allocate such memory; return its number, or None if that fails. A collective."""
        what = f"{nbytes} bytes of symmetric memory"
        number = len(self.transport.node_memories)
        try:
            self.add_node_memory(nbytes, device)
        except TransportError as error:
            _logger.info("all-reduces on %s have no %s: %s", device, what, error)
            return None
        _logger.info("all-reduces on %s have %s", device, what)
        return number

    def context(self, label: str) -> CallContext:
        """Return the context of a call's steps. label: The call's name in errors."""
        return CallContext(self.transport, label, self.timeout, self.workspace, self.topology)

    def all_reduce(
        self,
        flat: Tensor,
        op: Reducer,
        options: AllReduceOptions,
        label: str,
        *,
        schedule: Schedule | None = None,
        prescale: float | None = None,
    ) -> None:
        """Reduce a 1-D tensor over all ranks, in place.

        Args:
            flat: This rank's vector.
            op: The operator.
            options: The algorithm and other options.
            label: The call's name in errors.
            schedule: The schedule to run, instead of the options' algorithm.
            prescale: The factor of this rank's contribution, instead of the options' factor times
                the operator's.
        """
        if prescale is None:
            prescale = options.prescale * op.prescale(flat.dtype, self.size)
        algorithm, phases = self._phases(flat, op, options, schedule)
        with call_span(label, op, algorithm, flat):
            multiply(flat, prescale * phases.prescale)
            context, buffer = self.context(label), flat
            if phases.library is not None or phases.host:
                buffer = self._before_schedule(phases, flat, context)
            if phases.schedule is not None:
                reducers = (op if op.ordered else Sum, op) if phases.two_levels else op
                execute(phases.schedule, buffer, reducers, context, segments=options.segments)
            if buffer is not flat:
                flat.copy_(buffer)
            op.finish(flat, self.size)
        if options.postscale != 1.0:
            multiply(flat, options.postscale)

    def _phases(
        self, flat: Tensor, op: Reducer, options: AllReduceOptions, schedule: Schedule | None
    ) -> tuple[object, AllReducePhases]:
        """Return the phases to run, after their name in profilers."""
        if self.size == 1:
            return "one rank", AllReducePhases()
        if schedule is not None:
            return schedule.name, AllReducePhases(schedule=schedule)
        spec = self._spec(options, flat, op, flat.numel())
        round_robin = ONE_TENSOR
        if spec.is_round_robin:
            round_robin = RoundRobin(_count(options.segments), self.first)
        self.first += 1
        return spec, phases_of(spec, op, self.topology, round_robin)

    def _spec(
        self, options: AllReduceOptions, flat: Tensor, op: Reducer, numel: int
    ) -> AllReduceSpec:
        """Return the range for `numel` elements of `flat`'s dtype and device; never `auto`."""
        spec = spec_for(options.specs, numel)
        if spec.outer == "auto":
            spec = self.choose(flat, op, numel * flat.element_size())
        return for_dtype(spec, op, flat.dtype) if op.reads_tree else spec

    def all_reduce_packed(
        self, tensors: Sequence[Tensor], op: Reducer, options: AllReduceOptions, label: str
    ) -> None:
        """Reduce tensors of one dtype and device as one vector, in place."""
        vector = None if self.size == 1 else vector_of(tensors, options.segments)
        if vector is None:
            for tensor in tensors:
                self.all_reduce(flatten(tensor), op, options, label)
        elif vector.layout is None:
            vector.fill(vector.tensors[0])
            options = options._replace(segments=vector.segments)
            self.all_reduce(vector.tensors[0], op, options, label)
        else:
            buffer = vector.buffer(self.packed)
            prescale = op.prescale(buffer.dtype, self.size)
            vector.fill(buffer, options.prescale * prescale)
            packed = AllReduceOptions(options.specs, vector.segments)
            self.all_reduce(buffer, op, packed, label, prescale=1.0)
            vector.store(buffer, options.postscale)

    def reduces_by_tree(
        self, tensors: Sequence[Tensor], op: Reducer, options: AllReduceOptions
    ) -> bool:
        """Return whether one reduction of all tensors gets all ranks' operands, with their tree."""
        if self.size == 1 or not op.reads_tree or not tensors:
            return False
        options, vector = options.as_vector(tensors)
        if vector is None:
            return False
        spec = self._spec(options, tensors[0], op, vector.numel)
        record = algorithm(spec.outer)
        return spec.inner is None and Needs.ALL_OPERANDS in record.meets and record.by_tree

    def replays(self, call: Call) -> bool:
        """Return whether a request runs a schedule that stays on one GPU's streams.

        A library's own sum is a single launch even without a graph.
        """
        devices = {tensor.device for tensor in call.memory}
        if self.size == 1 or len(devices) != 1 or call.kind not in _REPLAYED:
            return False
        if not any(tensor.numel() for tensor in call.tensors):
            return False
        (device,) = devices
        declared = call.op.replays and "replays" in vars(type(call.op))
        if not (declared and self.transport.captures(device)):
            return False
        if call.schedule is not None:
            return True
        nbytes = sum(tensor.nbytes for tensor in call.tensors)
        for spec in AllReduceOptions.of(call).specs:
            if spec.outer == "auto":
                spec = self.choose(call.tensors[0], call.op, nbytes)
            phases = phases_of(spec, call.op, self.topology)
            if phases.host or phases.schedule is None or phases.library not in (None, "nccl"):
                return False
        return True

    def execute(
        self,
        call: Call,
        schedule: Schedule,
        flat: Tensor,
        op: Reducer,
        bounds: Sequence[int] | None = None,
    ) -> None:
        """Run a call's schedule in place, if there are several ranks; arguments as of `execute`."""
        if self.size > 1:
            execute(schedule, flat, op, self.context(call.label), bounds=bounds)

    def factor(self, call: Call, dtype: torch.dtype) -> float:
        """Return the product of the call's and the operator's factors before the reduction."""
        asked: float = call.options["prescale"]
        return asked * call.op.prescale(dtype, self.size)

    def finish(self, call: Call, flat: Tensor) -> None:
        """Apply the operator's `finish` and the call's postscale to a result."""
        call.op.finish(flat, self.size)
        multiply(flat, call.options["postscale"])

    def choose(self, flat: Tensor, op: Reducer, nbytes: int | None = None) -> AllReduceSpec:
        """Return the algorithm that `auto` stands for, the same on all ranks and in every run.

        nbytes: The bytes of all tensors, if `flat` is one of several.
        """
        device, library = "cuda" if flat.is_cuda else "cpu", None
        if flat.is_cuda and is_plain_sum(op):
            library = self._library_for(flat)
        return auto_of(
            op, device, flat.nbytes if nbytes is None else nbytes, self.topology, library
        )

    def _library_for(self, flat: Tensor) -> str | None:
        """Return the name of NCCL's own sum if `auto` may use it, the same on all ranks."""
        dtype = flat.dtype.to_real() if flat.is_complex() else flat.dtype
        if dtype not in DTYPES:
            return None
        if self.transport.sums_on_gpu:
            return "nccl"
        group = self.transport.process_group
        return None if group is None or not has_nccl(group) else "collective"

    def _before_schedule(self, phases: AllReducePhases, flat: Tensor, call: CallContext) -> Tensor:
        """Sum by the phases' library, if any; return the buffer for the schedule."""
        on_host = phases.host and flat.is_cuda
        # NCCL's own sum inside the nodes works on the GPUs.
        buffer = _on_host(flat) if on_host and phases.library != "nccl" else flat
        if phases.library is None:
            return buffer
        ranks = None
        if phases.schedule is not None:
            ranks = self.node
        if ranks is None or len(ranks) > 1:
            self.libraries.all_reduce(phases.library, phases.shards, buffer, ranks, call)
        if on_host and buffer is flat and phases.schedule is not None:
            # The copy waits until that sum has ended or was aborted.
            buffer = _on_host(flat)
            self.transport.check_streams()
        return buffer


def all_reduce(runner: Runner, call: Call) -> Tensor:
    """Carry out an all_reduce, or a run of a user's schedule."""
    (tensor,) = call.tensors
    options = AllReduceOptions.of(call)
    runner.all_reduce(flatten(tensor), call.op, options, call.label, schedule=call.schedule)
    return tensor


def grouped_all_reduce(runner: Runner, call: Call) -> Sequence[Tensor]:
    """Carry out a grouped_all_reduce."""
    for options, tensors in AllReduceOptions.of(call).by_range(call.tensors):
        runner.all_reduce_packed(tensors, call.op, options, call.label)
    return call.tensors


def _count(segments: Sequence[int] | None) -> int:
    """Return the number of non-empty tensors in a buffer."""
    if segments is None:
        return 1
    return max(1, sum(low < high for low, high in pairwise(segments)))


def _on_host(flat: Tensor) -> Tensor:
    buffer = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    return buffer.copy_(flat)


def call_span(
    label: str, op: Reducer, algorithm: object, vector: Tensor
) -> AbstractContextManager[object]:
    """Return a context that shows an all-reduce as a range in profilers' timelines."""

    def name() -> str:
        return f"{label.partition(' (call ')[0]}: {op}, {algorithm}, {vector.nbytes} B"

    return span(name, cuda=vector.is_cuda)
