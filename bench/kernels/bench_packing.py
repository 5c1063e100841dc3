"""pack and unpack, and their plans, beside every way in which torch does the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_elementwise as in_torch
from bench.kernels.bounds import rounding
from bench.kernels.case import Case, Contender
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.timing import DEVICE
from bench.shapes import MODELS, Shape

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALE = 1 / 3


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row: dtypes of the tensors and of the buffer, and the factor.

    misaligned: whether tensors start one element off a 16-byte boundary.
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
    buffer = normal(layout.numel, layout.dtype)
    # What peers pack into is a part of our buffer, so that all find the same in the caches.
    tight = buffer[: sum(layout.numels)]
    if spec.kernel == "unpack" and tight.numel() < layout.numel:
        tight = torch.cat([view.reshape(-1) for view in layout.views(buffer)])
    # Lists that take turns share one buffer.
    lists = (tensors if not i else [each.clone() for each in tensors] for i in range(spec.sets))
    return case.completed((_make(spec, each, layout, buffer, tight) for each in lists), compiled)


def _make(
    spec: Spec, tensors: list[Tensor], layout: kernels.Layout, buffer: Tensor, tight: Tensor
) -> Case:
    flag = torch.zeros((), device=DEVICE) if spec.checked else None
    options: dict[str, Any] = {"layout": layout, "found_inf": flag}
    if spec.kernel == "pack":
        given: list[Any] = [tensors]
        options["out"] = buffer
        source, target, sent = spec.tensor, spec.buffer, tensors
        reference, peers = _packed, in_torch.pack
        traffic = kernels.pack_bytes(tensors, layout=layout)
    else:
        given = [buffer, tensors]
        source, target, sent = spec.buffer, spec.tensor, layout.views(buffer)
        reference, peers = _unpacked, in_torch.unpack
        traffic = kernels.unpack_bytes(buffer, tensors, layout=layout)
    exact = spec.scale == 1.0 and target.itemsize >= source.itemsize
    bound = 0.0 if exact else rounding(target, 1)
    call, plan = (getattr(kernels, name) for name in (spec.kernel, f"plan_{spec.kernel}"))
    ours = Contender(
        "ours",
        partial(call, *given, scale=spec.scale, **options),
        bound,
        layout.views if sent is tensors else list,
        [buffer] if sent is tensors else tensors,
        None if flag is None else (flag, sent[-1]),
        partial(_check_padding, layout, buffer) if sent is tensors else None,
    )
    job = in_torch.Packing(tight, spec.scale, flag, bound, tensors)
    return Case(
        spec,
        size=spec.size,
        traffic=traffic,
        elements=tight.numel(),
        tensors=len(tensors),
        ours=ours,
        peers=peers(job),
        expected=lambda: ((reference(group, spec.scale), None) for group in _groups(sent)),
        plan=lambda: partial(plan(*given, **options), spec.scale),
        compiled=lambda: [getattr(peers_compiled, spec.kernel)(job)],
    )


def _check_padding(layout: kernels.Layout, buffer: Tensor) -> None:
    parts = zip(layout.offsets, layout.numels, layout.segments[1:], strict=True)
    if torch.cat([buffer[at + numel : end] for at, numel, end in parts]).count_nonzero():
        raise case.WrongAnswer("ours: the padding is not zero")


def _packed(group: list[Tensor], scale: float) -> Tensor:
    layout = kernels.layout_of(group, dtype=torch.float64, alignment=8)
    return kernels.pack_reference(group, layout=layout, scale=scale)


def _unpacked(group: list[Tensor], scale: float) -> Tensor:
    joined = torch.cat(group)
    layout = kernels.layout_of([joined], alignment=joined.element_size())
    return kernels.unpack_reference(joined, layout, scale=scale)[0]


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
