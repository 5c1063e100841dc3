"""dot_and_norms, combine, adasum and their plans beside the formulas in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import pytest
import torch
from torch import Tensor

import kernels
from adasum.check.one_gpu import dots_bound, magnitudes, rounding
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_projection as in_torch
from bench.kernels.case import Answer, Case, Contender
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.measure import DIRECT, ONE_DOT, ONE_SEGMENT, TWO, TWO_APART
from bench.kernels.timing import DEVICE, Call
from bench.shapes import MODELS
from kernels.gpu import launcher

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# About 8 MiB of float32 fit on a chip; from there to 25 MiB, a usual bucket of gradients, the GPU's
# cache decides whether one launch reads again from there, or two from memory.
BETWEEN = {"cuda": [9_000_000, 12_000_000, 15_000_000, 25 * inputs.MIB], "cpu": []}[DEVICE]
ADASUM_SIZES = sorted({*inputs.SIZES, 8 * inputs.MIB, *BETWEEN})
LISTS = {"cuda": ["ResNet-50", "BERT-large"], "cpu": ["ResNet-50"]}[DEVICE]


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row.

    Attributes:
        size: Bytes of one operand.
        dtype: Dtype of the operands.
        model: The model whose tensors are the segments, "" for one segment or equal ones.
        parts: How many equal segments, of `part` elements each; 0 for one, or a model's.
        part: Elements of such a segment.
    """

    size: int = 0
    dtype: torch.dtype = FP32
    model: str = ""
    parts: int = 0
    part: int = inputs.MANY_NUMEL


def _specs() -> Iterator[Spec]:
    for kernel in ("dot_and_norms", "combine", "adasum"):
        for size in ADASUM_SIZES if kernel == "adasum" else inputs.SIZES:
            label = f"{size / 1e6:g} MB" if size in BETWEEN[:3] else size_label(size)
            yield Spec(kernel, "fp32", f"fp32 {label}", size)
        for size in inputs.FEW_SIZES:
            yield Spec(kernel, "bf16", f"bf16 {size_label(size)}", size, BF16)
            # Not the others: their peers round dots to float16, where large tensors overflow.
            if kernel == "combine":
                yield Spec(kernel, "fp16", f"fp16 {size_label(size)}", size, FP16)
        for model in LISTS:
            label = f"{model} ({len(MODELS[model])} segments)"
            yield Spec(kernel, "segments", label, model=model)
        for size in inputs.PLAN_SIZES:
            yield Spec(kernel, PLANNED, f"{PLANNED} {size_label(size)}", size, planned=True)
        label = f"{PLANNED} ResNet-50"
        yield Spec(kernel, "planned segments", label, model="ResNet-50", planned=True)
    if DEVICE == "cuda":
        series = "segments on chip"
        yield Spec("adasum", series, f"{inputs.MANY} segments on chip", parts=inputs.MANY)
        label = f"{inputs.MANY} segments on chip, at odd offsets"
        yield Spec("adasum", series, label, parts=inputs.MANY, part=inputs.MANY_NUMEL + 1)
        yield Spec(
            "adasum",
            inputs.WALL,
            f"{inputs.MANY} segments by wall clock",
            parts=inputs.MANY,
            wall=True,
        )


SPECS = list(_specs())


@dataclass(frozen=True)
class Job:
    """What the three kernels are given, and the expected answers in float64."""

    pair: in_torch.Pair
    bounds: tuple[int, ...]
    planned: bool = False

    @property
    def segments(self) -> tuple[int, ...] | None:
        """None for one segment, as a caller without a list passes it."""
        return self.bounds if self.pair.many else None

    @property
    def dots_bound(self) -> float:
        return dots_bound(self.pair.a.dtype, self.pair.a.numel())

    def dots(self) -> Tensor:
        return kernels.dot_and_norms_reference(self.pair.a, self.pair.b, self.segments)

    def combined(self) -> Answer:
        """Return Adasum, and for each element the magnitude by which errors of the dots count."""
        a, b, dots = self.pair.a, self.pair.b, self.dots()
        return (
            kernels.combine_reference(a, b, dots, self.segments),
            magnitudes(a, b, dots, self.segments),
        )


# Ours, the direct call, the peers, the answer and the traffic.
Made = tuple[Contender, Call, list[Contender], Callable[[], Answer], int]


def _dot_and_norms(job: Job) -> Made:
    a, b = job.pair.a, job.pair.b
    direct = partial(kernels.dot_and_norms, a, b, job.segments)
    call = kernels.plan_dot_and_norms(a, b, job.segments) if job.planned else direct

    def make() -> Answer:
        dots = job.dots()
        magnitudes = torch.stack([(dots[:, 1] * dots[:, 2]).sqrt(), dots[:, 1], dots[:, 2]], 1)
        return dots.view(-1), magnitudes.view(-1)

    ours = Contender("ours", call, job.dots_bound, lambda dots: [dots.view(-1)])
    traffic = kernels.dot_and_norms_bytes(a, b, job.segments)
    return ours, direct, in_torch.dot_and_norms(job.pair), make, traffic


def _combine(job: Job) -> Made:
    a, b, out = job.pair.a, job.pair.b, job.pair.out
    dots = kernels.dot_and_norms(a, b, job.segments)
    bound = rounding(a.dtype, 2)
    direct = partial(kernels.combine, a, b, dots, job.segments, out=out)
    call = kernels.plan_combine(a, b, dots, job.segments, out=out) if job.planned else direct

    def make() -> Answer:
        # With -|d| for d no coefficient is below its own size.
        worst = torch.cat([-dots[:, :1].abs(), dots[:, 1:]], 1)
        return (
            kernels.combine_reference(a, b, dots, job.segments),
            kernels.combine_reference(a.abs(), b.abs(), worst, job.segments),
        )

    ours = Contender("ours", call, bound, written=[out])
    traffic = kernels.combine_bytes(a, b, job.segments)
    return ours, direct, in_torch.combine(job.pair, dots, bound), make, traffic


def _adasum(job: Job) -> Made:
    a, b, out = job.pair.a, job.pair.b, job.pair.out
    bound = rounding(a.dtype, 2) + job.dots_bound
    direct = partial(kernels.adasum, a, b, job.segments, out=out)
    call = kernels.plan_adasum(a, b, job.segments, out=out) if job.planned else direct
    ours = Contender("ours", call, bound, written=[out])
    return ours, direct, in_torch.adasum(job.pair, bound), job.combined, kernels.adasum_bytes(a, b)


def _in_two_launches(job: Job) -> dict[str, Call]:
    """Return plans of two launches, whose second one waits by itself or, as before, is held back.

    None where the GPU cannot do the former.
    """
    a, b, out = job.pair.a, job.pair.b, job.pair.out
    chip = launcher.chip_of(a.device)
    plans: dict[str, Call] = {}
    for name, dependent in ((TWO, True), (TWO_APART, False)) if chip.dependent_launch else ():
        as_if = chip._replace(dependent_launch=dependent)
        with mock.patch.object(launcher, "chip_of", return_value=as_if):
            plans[name] = kernels.plan_adasum(a, b, job.segments, out=out, cooperative=False)
    return plans


MAKERS = {"dot_and_norms": _dot_and_norms, "combine": _combine, "adasum": _adasum}


def case_of(spec: Spec, compiled: bool = DEVICE == "cuda") -> Case:
    """Return the case of a row; with `compiled`, torch.compile is a peer: minutes on a CPU."""
    bounds: tuple[int, ...] = (0, spec.size // spec.dtype.itemsize)
    if spec.parts:
        bounds = tuple(range(0, (spec.parts + 1) * spec.part, spec.part))
    if spec.model:
        shapes = MODELS[spec.model]
        bounds = kernels.layout_of([torch.empty(shape, device=DEVICE) for shape in shapes]).segments
    a, b = (normal(bounds[-1], spec.dtype) for _ in range(2))
    out = torch.empty_like(a)
    job = Job(in_torch.Pair(a, b, out, bounds), bounds, spec.planned)
    ours, direct, peers, make, traffic = MAKERS[spec.kernel](job)
    if compiled:
        peers = [*peers, *_compiled(spec.kernel, job, ours.bound)]
    beside: dict[str, Call] = {DIRECT: direct} if spec.planned else {}
    if spec.kernel == "adasum" and spec.planned and DEVICE == "cuda":
        beside |= _in_two_launches(job)
    if spec.kernel == "dot_and_norms":
        beside[ONE_DOT] = lambda: torch.dot(a, b)
    if job.pair.many and not (spec.planned or spec.wall):
        whole = Job(in_torch.Pair(a, b, out, (0, a.numel())), (0, a.numel()))
        beside[ONE_SEGMENT] = MAKERS[spec.kernel](whole)[0].call
    return Case(
        spec,
        size=a.numel() * a.element_size(),
        traffic=traffic,
        elements=a.numel(),
        tensors=len(bounds) - 1,
        ours=ours,
        peers=peers,
        expected=cache(lambda: [make()]),
        beside=beside,
        reads=spec.kernel == "dot_and_norms",
    )


def _compiled(kernel: str, job: Job, bound: float) -> list[Contender]:
    """Return torch.compile as a peer; of dots and combine, for one segment."""
    pair = job.pair
    if kernel == "adasum":
        return [in_torch.compiled(pair, bound)]
    if pair.many:
        return []
    if kernel == "dot_and_norms":
        return [peers_compiled.dots(pair.a, pair.b, pair.slack, in_torch.SUMS)]
    bound += 8 * torch.finfo(pair.a.dtype).eps
    return [peers_compiled.combine(pair.a, pair.b, job.dots(), pair.out, bound)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_projection(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
