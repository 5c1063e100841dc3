"""sum_n and scaled_add, and their plans, beside every way in which torch does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from adasum.check.one_gpu import rounding
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_elementwise as in_torch
from bench.kernels.case import Answer, Case, Contender, check_flag, rotating
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.measure import DIRECT
from bench.kernels.timing import DEVICE, Call

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# They do not add up to one, else torch.lerp could do it.
ALPHA, BETA = 0.3, 0.6
SCALE = 1 / 3


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row.

    Attributes:
        size: Bytes of the first tensor.
        tensors: Dtypes of the tensors.
        out: Dtype of the output.
        scale: The factor of sum_n.
    """

    size: int
    tensors: tuple[torch.dtype, ...]
    out: torch.dtype = FP32
    scale: float = 1.0


def _spec(
    kernel: str, series: str, size: int, tensors: tuple[torch.dtype, ...], **options: Any
) -> Spec:
    return Spec(kernel, series, f"{series} {size_label(size)}", size, tensors, **options)


def _specs() -> Iterator[Spec]:
    for count in (2, 8):
        for size in inputs.SIZES:
            yield _spec("sum_n", f"n={count}", size, (FP32,) * count)
    for count in range(3, 8):
        yield _spec("sum_n", f"n={count}", inputs.SIZES[-2], (FP32,) * count)
    options: dict[str, Any]
    for series, dtype, options in (
        ("n=8, bf16", BF16, {"out": BF16}),
        ("n=8, bf16 to fp32", BF16, {}),
        ("n=8, fp32 to bf16", FP32, {"out": BF16}),
        ("n=8, fp16", FP16, {"out": FP16}),
        ("n=8, fp16 to fp32", FP16, {}),
        ("n=8, scaled", FP32, {"scale": SCALE}),
        ("n=8, scaled, found_inf", FP32, {"scale": SCALE, "checked": True}),
    ):
        for size in inputs.FEW_SIZES:
            yield _spec("sum_n", series, size, (dtype,) * 8, **options)
    for size in inputs.SIZES:
        yield _spec("scaled_add", "fp32", size, (FP32, FP32))
    for series, dtypes, options in (
        ("bf16", (BF16, BF16), {"out": BF16}),
        ("fp16", (FP16, FP16), {"out": FP16}),
        ("fp32 + bf16 to fp32", (FP32, BF16), {}),
        ("bf16 + fp32 to bf16", (BF16, FP32), {"out": BF16}),
        ("fp32, found_inf", (FP32, FP32), {"checked": True}),
    ):
        for size in inputs.FEW_SIZES:
            yield _spec("scaled_add", series, size, dtypes, **options)
    for kernel in ("sum_n", "scaled_add"):
        for size in inputs.PLAN_SIZES:
            yield _spec(kernel, PLANNED, size, (FP32, FP32), planned=True)
    if DEVICE == "cuda":
        series = f"n=8 at {inputs.FRESH}"
        yield _spec(
            "sum_n", series, 64 * inputs.KIB, (FP32,) * 8, sets=inputs.FRESH_SETS, wall=True
        )


SPECS = list(_specs())


def case_of(spec: Spec, compiled: bool = DEVICE == "cuda") -> Case:
    """Return the case of a row; with `compiled`, torch.compile is a peer: minutes on a CPU."""
    numel = spec.size // spec.tensors[0].itemsize
    tensors = [normal(numel, dtype) for dtype in spec.tensors]
    out = torch.empty(numel, dtype=spec.out, device=DEVICE)
    flag = torch.zeros((), device=DEVICE) if spec.checked else None
    options: dict[str, Any] = {"out": out, "found_inf": flag}
    bound = rounding(spec.out, len(tensors))
    # Every step of a coarse peer may round to the narrowest dtype in sight.
    narrowest = max(torch.finfo(dtype).eps for dtype in (spec.out, *spec.tensors))
    coarse = bound + 2 * len(tensors) * narrowest
    job = in_torch.Reduction(out, spec.scale, flag, bound, tensors, coarse)
    sums = spec.kernel == "sum_n"
    direct, planned, make, traffic = (_sum_n if sums else _scaled_add)(tensors, spec, options)
    peers = in_torch.sum_n(job) if sums else in_torch.scaled_add(job, ALPHA, BETA)
    call = planned() if spec.planned else direct

    def also() -> None:
        if flag is not None:
            check_flag(call, flag, tensors[-1])

    ours = Contender("ours", call, bound, written=[out], also=also)
    if spec.sets > 1:
        ours, peers = _fresh(ours, job, options, spec.sets)
    elif compiled:
        factors = (spec.scale,) * len(tensors) if sums else (ALPHA, BETA)
        peers.append(peers_compiled.weighted_sum(tensors, factors, out, flag, bound))
    return Case(
        spec,
        size=spec.size,
        traffic=traffic,
        elements=numel,
        tensors=len(tensors),
        ours=ours,
        peers=peers,
        expected=cache(lambda: [make()]),
        beside={DIRECT: direct} if spec.planned else {},
    )


def _fresh(
    ours: Contender, job: in_torch.Reduction, options: dict[str, Any], sets: int
) -> tuple[Contender, list[Contender]]:
    """Return sum_n and its peers on copies of the tensors, others at each call, into one output."""
    copies = [[tensor.clone() for tensor in job.tensors] for _ in range(sets)]
    mine = [replace(ours, call=partial(kernels.sum_n, copy, **options)) for copy in copies]
    peers = zip(*(in_torch.sum_n(replace(job, tensors=copy)) for copy in copies), strict=True)
    return rotating(mine), [rotating(each) for each in peers]


# The direct call, what makes a planned one, the answer and the traffic.
Made = tuple[Call, Callable[[], Call], Callable[[], Answer], int]


def _sum_n(tensors: list[Tensor], spec: Spec, options: dict[str, Any]) -> Made:
    def make() -> Answer:
        magnitude = torch.zeros(tensors[0].numel(), dtype=torch.float64, device=DEVICE)
        for tensor in tensors:
            magnitude += tensor.abs()
        return kernels.sum_n_reference(tensors, scale=spec.scale), magnitude.mul_(abs(spec.scale))

    direct = partial(kernels.sum_n, tensors, scale=spec.scale, **options)

    def planned() -> Call:
        return partial(kernels.plan_sum_n(tensors, **options), spec.scale)

    return direct, planned, make, kernels.sum_n_bytes(tensors, dtype=spec.out)


def _scaled_add(tensors: list[Tensor], spec: Spec, options: dict[str, Any]) -> Made:
    a, b = tensors

    def make() -> Answer:
        return (
            kernels.scaled_add_reference(a, b, alpha=ALPHA, beta=BETA),
            kernels.scaled_add_reference(a.abs(), b.abs(), alpha=ALPHA, beta=BETA),
        )

    direct = partial(kernels.scaled_add, a, b, alpha=ALPHA, beta=BETA, **options)

    def planned() -> Call:
        return partial(kernels.plan_scaled_add(a, b, **options), ALPHA, BETA)

    return direct, planned, make, kernels.scaled_add_bytes(a, b, dtype=spec.out)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_reduction(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
