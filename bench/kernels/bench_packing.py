"""pack and unpack, and their plans, beside every way in which torch does the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from adasum.check.one_gpu import rounding
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_elementwise as in_torch
from bench.kernels.case import Answer, Case, Contender, Expected
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.measure import DIRECT
from bench.kernels.timing import DEVICE, Call
from bench.shapes import MODELS, Shape

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALE = 1 / 3


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row.

    Attributes:
        shapes: Of the tensors.
        tensor: Dtype of the tensors.
        buffer: Dtype of the buffer.
        scale: The factor.
        misaligned: Whether tensors start one element off a 16-byte boundary.
    """

    shapes: tuple[Shape, ...]
    tensor: torch.dtype = FP32
    buffer: torch.dtype = FP32
    scale: float = 1.0
    misaligned: bool = False

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(map(math.prod, self.shapes)) * self.tensor.itemsize


SERIES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "misaligned": {"misaligned": True},
    "scaled": {"scale": SCALE},
    "bf16": {"tensor": BF16, "buffer": BF16},
    "bf16 buffer": {"buffer": BF16},
    "bf16 tensors": {"tensor": BF16},
    "bf16 buffer, scaled": {"buffer": BF16, "scale": SCALE},
    "fp16 buffer": {"buffer": FP16},
    "fp16 tensors": {"tensor": FP16},
    "fp16 buffer, scaled": {"buffer": FP16, "scale": SCALE},
    "scaled, found_inf": {"scale": SCALE, "checked": True},
}
# The other two take more memory than a shared machine can spare.
LISTS = {"cuda": list(MODELS), "cpu": ["ResNet-50", "Llama-7B layer"]}[DEVICE]


def _specs(kernel: str) -> Iterator[Spec]:
    shapes: tuple[Shape, ...]
    for series, options in SERIES.items():
        for size in inputs.SIZES if series == "aligned" else inputs.FEW_SIZES:
            # 16 tensors of `size` bytes in total.
            numel = size // 16 // options.get("tensor", FP32).itemsize
            shapes = ((numel,),) * 16
            yield Spec(kernel, series, f"{series} {size_label(size)}", shapes, **options)
    yield Spec(kernel, "many small", "1,000 x 1 KiB", ((inputs.KIB // 4,),) * 1000)
    yield Spec(kernel, "many small", "10,000 x 64 B", ((16,),) * 10_000)
    for name in LISTS:
        shapes = tuple(MODELS[name])
        yield Spec(kernel, "models", f"{name} ({len(shapes)} tensors)", shapes)
    for size in inputs.PLAN_SIZES:
        shapes = ((size // 16 // FP32.itemsize,),) * 16
        yield Spec(kernel, PLANNED, f"{PLANNED} {size_label(size)}", shapes, planned=True)
    shapes = tuple(MODELS["ResNet-50"])
    yield Spec(kernel, "planned model", f"{PLANNED} ResNet-50", shapes, planned=True)
    if DEVICE == "cuda":
        shapes = ((inputs.MANY_NUMEL,),) * inputs.MANY
        yield Spec(kernel, inputs.WALL, f"{inputs.MANY} tensors by wall clock", shapes, wall=True)
        for count in (16, inputs.MANY):
            shapes = ((inputs.MIB // count // 32 * 8,),) * count
            label = f"{count} tensors at {inputs.FRESH}"
            yield Spec(kernel, inputs.FRESH, label, shapes, wall=True, sets=inputs.FRESH_SETS)


SPECS = [*_specs("pack"), *_specs("unpack")]


def case_of(spec: Spec, compiled: bool = DEVICE == "cuda") -> Case:
    """Return the case of a row; with `compiled`, torch.compile is a peer: minutes on a CPU."""
    tensors = [normal(shape, spec.tensor, spec.misaligned) for shape in spec.shapes]
    layout = kernels.layout_of(tensors, dtype=spec.buffer)
    flag = torch.zeros((), device=DEVICE) if spec.checked else None
    options = {"layout": layout, "found_inf": flag}
    source, target = spec.tensor, spec.buffer
    if spec.kernel == "unpack":
        source, target = target, source
    exact = spec.scale == 1.0 and target.itemsize >= source.itemsize
    bound = 0.0 if exact else rounding(target, 1)
    make = _pack if spec.kernel == "pack" else _unpack
    ours, on, tight, traffic, expected = make(tensors, layout, options, spec, bound)
    job = in_torch.Packing(tight, spec.scale, flag, bound, tensors)
    peers = in_torch.pack(job) if spec.kernel == "pack" else in_torch.unpack(job)
    if spec.sets > 1:
        ours, peers = _fresh(spec, ours, on, job)
    elif compiled:
        peer = peers_compiled.pack if spec.kernel == "pack" else peers_compiled.unpack
        peers.append(peer(tensors, tight, spec.scale, flag, bound))
    return Case(
        spec,
        size=spec.size,
        traffic=traffic,
        elements=sum(layout.numels),
        tensors=len(tensors),
        ours=ours,
        peers=peers,
        expected=expected,
        beside={DIRECT: on(tensors)} if spec.planned else {},
    )


def _fresh(
    spec: Spec, ours: Contender, on: Callable[[list[Tensor]], Call], job: in_torch.Packing
) -> tuple[Contender, list[Contender]]:
    """Return ours and the peers on copies of the tensors, others at each call, and one buffer."""
    packing = spec.kernel == "pack"
    copies = [[tensor.clone() for tensor in job.tensors] for _ in range(spec.sets)]
    mine = [
        replace(ours, call=on(copy), written=ours.written if packing else copy) for copy in copies
    ]
    jobs = [replace(job, tensors=copy) for copy in copies]
    peers = zip(*map(in_torch.pack if packing else in_torch.unpack, jobs), strict=True)
    return case.rotating(mine), [case.rotating(each) for each in peers]


# Ours, a direct call on such tensors, the peers' buffer (without padding), the traffic, and the
# answer. Where possible that buffer is ours, too, so that all find the same in the caches.
Made = tuple[Contender, Callable[[list[Tensor]], Call], Tensor, int, Expected]


def _pack(
    tensors: list[Tensor], layout: kernels.Layout, options: dict[str, Any], spec: Spec, bound: float
) -> Made:
    out = torch.empty(layout.numel, dtype=layout.dtype, device=DEVICE)

    def on(given: list[Tensor]) -> Call:
        return partial(kernels.pack, given, out=out, scale=spec.scale, **options)

    call = on(tensors)
    if spec.planned:
        call = partial(kernels.plan_pack(tensors, out=out, **options), spec.scale)

    def also() -> None:
        ends = layout.segments[1:]
        padding = [
            out[offset + count : end]
            for offset, count, end in zip(layout.offsets, layout.numels, ends, strict=True)
        ]
        if torch.cat(padding).count_nonzero():
            raise case.WrongAnswer("ours: the padding is not zero")
        if spec.checked:
            case.check_flag(call, options["found_inf"], tensors[-1])

    def expected() -> Iterator[Answer]:
        for group in _groups(tensors):
            end_to_end = kernels.layout_of(group, dtype=torch.float64, alignment=8)
            yield kernels.pack_reference(group, layout=end_to_end, scale=spec.scale), None

    ours = Contender("ours", call, bound, layout.views, [out], also)
    tight = out[: sum(layout.numels)]
    return ours, on, tight, kernels.pack_bytes(tensors, layout=layout), expected


def _unpack(
    tensors: list[Tensor], layout: kernels.Layout, options: dict[str, Any], spec: Spec, bound: float
) -> Made:
    buffer = normal(layout.numel, layout.dtype)
    tight = buffer
    if sum(layout.numels) < layout.numel:
        tight = torch.cat([view.reshape(-1) for view in layout.views(buffer)])

    def on(given: list[Tensor]) -> Call:
        return partial(kernels.unpack, buffer, given, scale=spec.scale, **options)

    call = on(tensors)
    if spec.planned:
        call = partial(kernels.plan_unpack(buffer, tensors, **options), spec.scale)

    def also() -> None:
        if spec.checked:
            case.check_flag(call, options["found_inf"], layout.views(buffer)[-1])

    def expected() -> Iterator[Answer]:
        for group in _groups(layout.views(buffer)):
            joined = torch.cat(group)
            whole = kernels.layout_of([joined], alignment=joined.element_size())
            yield kernels.unpack_reference(joined, whole, scale=spec.scale)[0], None

    ours = Contender("ours", call, bound, list, tensors, also)
    traffic = kernels.unpack_bytes(buffer, tensors, layout=layout)
    return ours, on, tight, traffic, expected


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors as 1-D parts, end to end, in groups of at most CHUNK elements."""
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        for part in tensor.view(-1).split(case.CHUNK):
            if group and held + part.numel() > case.CHUNK:
                yield group
                group, held = [], 0
            group.append(part)
            held += part.numel()
    yield group


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_packing(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
