"""dot_and_norms, combine, adasum and their plans beside the formulas in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import pytest
import torch

import kernels
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_projection as in_torch
from bench.kernels.bounds import dots_bound, magnitudes, rounding
from bench.kernels.case import Answer, Case, Contender
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.measure import ONE_DOT, ONE_SEGMENT, TWO, TWO_APART
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
    """One row: bytes and dtype of one operand.

    model: the model whose tensors are the segments, "" for one segment or equal ones; parts: how
    many equal segments, of `part` elements each, 0 for one, or a model's.
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


# Ours, what makes a plan, the answer, the traffic, the peers and torch.compile, of one segment or
# of many.
Made = tuple[
    Contender,
    Callable[[], Call],
    Callable[[], Answer],
    int,
    list[Contender],
    Callable[[], list[Contender]],
]


def _dot_and_norms(pair: in_torch.Pair) -> Made:
    given = pair.a, pair.b, pair.segments

    def expected() -> Answer:
        dots = kernels.dot_and_norms_reference(*given)
        magnitudes = torch.stack([(dots[:, 1] * dots[:, 2]).sqrt(), dots[:, 1], dots[:, 2]], 1)
        return dots.view(-1), magnitudes.view(-1)

    def compiled() -> list[Contender]:
        peer = peers_compiled.dots(pair.a, pair.b, pair.slack, in_torch.SUMS)
        return [] if pair.many else [peer]

    direct, bound = partial(kernels.dot_and_norms, *given), _dots_bound(pair)
    return (
        Contender("ours", direct, bound, lambda dots: [dots.view(-1)]),
        partial(kernels.plan_dot_and_norms, *given),
        expected,
        kernels.dot_and_norms_bytes(*given),
        in_torch.dot_and_norms(pair),
        compiled,
    )


def _combine(pair: in_torch.Pair) -> Made:
    a, b, out, segments = pair.a, pair.b, pair.out, pair.segments
    dots = kernels.dot_and_norms(a, b, segments)
    bound = rounding(a.dtype, 2)

    def expected() -> Answer:
        # With -|d| for d no coefficient is below its own size.
        worst = torch.cat([-dots[:, :1].abs(), dots[:, 1:]], 1)
        return (
            kernels.combine_reference(a, b, dots, segments),
            kernels.combine_reference(a.abs(), b.abs(), worst, segments),
        )

    def compiled() -> list[Contender]:
        coarse = bound + 8 * torch.finfo(a.dtype).eps
        return [] if pair.many else [peers_compiled.combine(a, b, dots, out, coarse)]

    direct = partial(kernels.combine, a, b, dots, segments, out=out)
    return (
        Contender("ours", direct, bound, written=[out]),
        partial(kernels.plan_combine, a, b, dots, segments, out=out),
        expected,
        kernels.combine_bytes(a, b, segments),
        in_torch.combine(pair, dots, bound),
        compiled,
    )


def _adasum(pair: in_torch.Pair) -> Made:
    a, b, out, segments = pair.a, pair.b, pair.out, pair.segments
    bound = rounding(a.dtype, 2) + _dots_bound(pair)

    def expected() -> Answer:
        """Return Adasum, and for each element the magnitude by which errors of the dots count."""
        dots = kernels.dot_and_norms_reference(a, b, segments)
        return kernels.combine_reference(a, b, dots, segments), magnitudes(a, b, dots, segments)

    return (
        Contender("ours", partial(kernels.adasum, a, b, segments, out=out), bound, written=[out]),
        partial(kernels.plan_adasum, a, b, segments, out=out),
        expected,
        kernels.adasum_bytes(a, b),
        in_torch.adasum(pair, bound),
        lambda: [in_torch.compiled(pair, bound)],
    )


def _dots_bound(pair: in_torch.Pair) -> float:
    return dots_bound(pair.a.dtype, pair.a.numel())


def _in_two_launches(pair: in_torch.Pair) -> dict[str, Call]:
    """Return plans of two launches, whose second one waits by itself or, as before, is held back.

    It is empty where the GPU cannot do the former.
    """
    chip = launcher.chip_of(pair.a.device)
    plans: dict[str, Call] = {}
    for name, dependent in ((TWO, True), (TWO_APART, False)) if chip.dependent_launch else ():
        as_if = chip._replace(dependent_launch=dependent)
        with mock.patch.object(launcher, "chip_of", return_value=as_if):
            plans[name] = kernels.plan_adasum(
                pair.a, pair.b, pair.segments, out=pair.out, cooperative=False
            )
    return plans


MAKERS = {"dot_and_norms": _dot_and_norms, "combine": _combine, "adasum": _adasum}


def case_of(spec: Spec, compiled: bool = DEVICE == "cuda") -> Case:
    """Return the case of a row; with `compiled`, torch.compile is a peer: minutes on a CPU."""
    bounds: Sequence[int] = (0, spec.size // spec.dtype.itemsize)
    if spec.parts:
        bounds = range(0, (spec.parts + 1) * spec.part, spec.part)
    if spec.model:
        shapes = MODELS[spec.model]
        bounds = kernels.layout_of([torch.empty(shape, device=DEVICE) for shape in shapes]).segments
    a, b = (normal(bounds[-1], spec.dtype) for _ in range(2))
    pair = in_torch.Pair(a, b, torch.empty_like(a), bounds)
    ours, plan, expected, traffic, peers, others = MAKERS[spec.kernel](pair)
    beside: dict[str, Call] = {}
    if spec.kernel == "adasum" and spec.planned and DEVICE == "cuda":
        beside = _in_two_launches(pair)
    if spec.kernel == "dot_and_norms":
        beside[ONE_DOT] = lambda: torch.dot(a, b)
    if pair.many and not (spec.planned or spec.wall):
        whole = in_torch.Pair(a, b, pair.out, (0, a.numel()))
        beside[ONE_SEGMENT] = MAKERS[spec.kernel](whole)[0].call
    row = Case(
        spec,
        size=a.nbytes,
        traffic=traffic,
        elements=a.numel(),
        tensors=len(bounds) - 1,
        ours=ours,
        peers=peers,
        expected=cache(lambda: [expected()]),
        beside=beside,
        reads=spec.kernel == "dot_and_norms",
        plan=plan,
        compiled=others,
    )
    return case.completed(iter([row]), compiled)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_projection(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
