"""All-reduces by messages: the algorithm is chosen, and its phases run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from collectives.cost import LinkRates
from collectives.cost.choice import choose
from collectives.execution.executor import Workspace, execute
from collectives.execution.phases import AllReducePhases, phases_of
from collectives.execution.vendor import Libraries
from collectives.fused_buffer import buffer_of
from collectives.reducers import Reducer, Sum, kernels
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology
from collectives.trace import span
from collectives.transport.base import Transport

Tensor = torch.Tensor
__all__ = ["Runner", "Specs"]

Specs = tuple[AllReduceSpec, ...]


class Runner:
    """One rank's transport, memory and libraries, and what they do to a buffer together."""

    def __init__(self, transport: Transport, topology: Topology, timeout: float) -> None:
        self.transport = transport
        self.topology = topology
        self.timeout = timeout
        self.workspace = Workspace()
        self.packed = Workspace()
        self.libraries = Libraries(transport)
        self.link_rates: LinkRates | None = None
        # What the messages of the call that runs now carry.
        self.code = 0

    def check(self, specs: Specs, op: Reducer, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError where one of the ranges cannot reduce such tensors here."""
        devices = {tensor.device for tensor in tensors}
        for spec in specs:
            if spec.outer == "auto":
                continue
            phases = phases_of(spec, op, self.topology)
            on_gpu = any(device.type == "cuda" for device in devices)
            if phases.host and on_gpu and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"algorithm {spec} reduces on the host, which no CUDA graph can hold: use psgpu"
                )
            for phase in phases.sequence:
                if phase.library is not None:
                    for device in devices:
                        self.libraries.check(phase.library, device)

    def execute(
        self,
        schedule: Schedule,
        flat: Tensor,
        op: Reducer | Sequence[Reducer],
        label: str,
        segments: Sequence[int] | None = None,
        bounds: Sequence[int] | None = None,
    ) -> None:
        """Run one schedule in place."""
        execute(
            schedule,
            flat,
            self.transport,
            op,
            label=label,
            timeout=self.timeout,
            workspace=self.workspace,
            segments=segments,
            bounds=bounds,
            code=self.code,
        )

    def all_reduce(
        self,
        flat: Tensor,
        op: Reducer,
        specs: Specs,
        segments: Sequence[int] | None,
        prescale: float,
        postscale: float,
        label: str,
    ) -> None:
        """Reduce a 1-D tensor over all ranks, in place."""
        size = self.transport.size
        algorithm: AllReduceSpec | str = "one rank"
        if size > 1:
            spec = spec_for(specs, flat.numel())
            if spec.outer == "auto":
                spec = self._choose(flat, op)
            phases = phases_of(spec, op, self.topology)
            prescale *= phases.prescale
            algorithm = spec

        def name() -> str:
            call = label.partition(" (call ")[0]
            return f"{call}: {op}, {algorithm}, {flat.nbytes} B"

        with span(name, cuda=flat.is_cuda):
            if prescale != 1.0:
                flat.mul_(prescale)
            if size > 1:
                self._run(phases, flat, op, segments, label)
            op.finish(flat, size)
        if postscale != 1.0:
            flat.mul_(postscale)

    def all_reduce_packed(
        self,
        tensors: Sequence[Tensor],
        op: Reducer,
        specs: Specs,
        prescale: float,
        postscale: float,
        label: str,
    ) -> None:
        """Reduce tensors of one dtype and device as one buffer, each a segment of it, in place.

        Nothing is packed where they lie in a FusedBuffer.
        """
        if self.transport.size == 1 or len(tensors) == 1 or tensors[0].dtype not in kernels.DTYPES:
            for tensor in tensors:
                flat = tensor.view(-1)
                self.all_reduce(flat, op, specs, None, prescale, postscale, label)
            return
        fused = buffer_of(tensors)
        if fused is not None:
            segments = fused.layout.segments
            self.all_reduce(fused.buffer, op, specs, segments, prescale, postscale, label)
            return
        layout = kernels.layout_of(tensors)
        # On CUDA the allocator keeps it, by stream.
        like = tensors[0]
        buffer = self.packed.take(layout.numel, like) if like.is_cpu else None
        buffer = kernels.pack(tensors, layout=layout, scale=prescale, out=buffer)
        self.all_reduce(buffer, op, specs, layout.segments, 1.0, 1.0, label)
        kernels.unpack(buffer, tensors, layout=layout, scale=postscale)

    def _choose(self, flat: Tensor, op: Reducer) -> AllReduceSpec:
        """Return what `auto` stands for: by the measured costs where there are any.

        The order of Adasum's partial sums must not depend on a measurement: a second run of the
        program has to give the same bits. Its choice is by size alone.
        """
        nbytes = flat.numel() * flat.element_size()
        if self.link_rates is None or op.needs_one_tree or flat.is_cuda:
            return AllReduceSpec(op.algorithm(nbytes, self.transport.size), 1, -1)
        (spec,) = parse_all_reduce_spec(choose(op, nbytes, self.link_rates, self.topology))
        return spec

    def _run(
        self,
        phases: AllReducePhases,
        flat: Tensor,
        op: Reducer,
        segments: Sequence[int] | None,
        label: str,
    ) -> None:
        buffer = flat
        if phases.host and flat.is_cuda:
            # NCCL's own sum inside the nodes works on the GPUs.
            near = tuple(phase for phase in phases.sequence if phase.library == "nccl")
            self._run_phases(replace(phases, sequence=near), flat, op, segments, label)
            phases = replace(phases, sequence=phases.sequence[len(near) :])
            buffer = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            buffer.copy_(flat)
        with self.transport.deferred():
            self._run_phases(phases, buffer, op, segments, label)
        if buffer is not flat:
            flat.copy_(buffer)

    def _run_phases(
        self,
        phases: AllReducePhases,
        buffer: Tensor,
        op: Reducer,
        segments: Sequence[int] | None,
        label: str,
    ) -> None:
        for phase in phases.sequence:
            if phase.schedule is not None:
                self.execute(
                    phase.schedule, buffer, (Sum, op) if phases.two_levels else op, label, segments
                )
            elif phase.library is not None and not (phase.local and self.topology.local_size == 1):
                self.libraries.all_reduce(
                    phase.library,
                    buffer,
                    phase.shards,
                    self.topology if phase.local else None,
                    label,
                    self.timeout,
                )
