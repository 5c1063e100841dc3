"""sum_n and scaled_add, and their plans, beside every way in which torch does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import kernels
from bench.kernels import case, inputs, peers_compiled
from bench.kernels import peers_elementwise as in_torch
from bench.kernels.bounds import rounding
from bench.kernels.case import Answer, Case, Contender
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.timing import DEVICE, Call

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# They do not add up to one, else torch.lerp could do it.
ALPHA, BETA = 0.3, 0.6
SCALE = 1 / 3


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row: bytes of the first tensor, dtypes of tensors and output, sum_n's options."""

    size: int
    tensors: tuple[torch.dtype, ...]
    out: torch.dtype = FP32
    scale: float = 1.0
    order: Literal["list", "tree"] = "list"
    accumulate: torch.dtype | None = None


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
        ("n=8, tree", FP32, {"order": "tree"}),
        ("n=8, tree, bf16", BF16, {"out": BF16, "order": "tree", "accumulate": BF16}),
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
    # Lists that take turns share one output.
    out = torch.empty(numel, dtype=spec.out, device=DEVICE)
    lists = (tensors if not i else [each.clone() for each in tensors] for i in range(spec.sets))
    return case.completed((_make(spec, each, out) for each in lists), compiled)


def _make(spec: Spec, tensors: list[Tensor], out: Tensor) -> Case:
    flag = torch.zeros((), device=DEVICE) if spec.checked else None
    bound = rounding(spec.out, len(tensors))
    if spec.accumulate is not None:
        # A rounding more a level of the tree, or an addition of a list.
        bound += len(tensors) * torch.finfo(spec.accumulate).eps / 2
    # Every step of a coarse peer may round to the narrowest dtype in sight.
    narrowest = max(torch.finfo(dtype).eps for dtype in (spec.out, *spec.tensors))
    coarse = bound + 2 * len(tensors) * narrowest
    job = in_torch.Reduction(out, spec.scale, flag, bound, tensors, coarse)
    make = _sum_n if spec.kernel == "sum_n" else _scaled_add
    direct, plan, expected, traffic, factors = make(tensors, spec, {"out": out, "found_inf": flag})
    checked = None if flag is None else (flag, tensors[-1])
    return Case(
        spec,
        size=spec.size,
        traffic=traffic,
        elements=out.numel(),
        tensors=len(tensors),
        ours=Contender("ours", direct, bound, written=[out], flag=checked),
        peers=in_torch.sum_n(job) if make is _sum_n else in_torch.scaled_add(job, ALPHA, BETA),
        expected=cache(lambda: [expected()]),
        plan=plan,
        compiled=lambda: [peers_compiled.weighted_sum(job, factors)],
    )


# The direct call, what makes a planned one, the answer, the traffic, and each tensor's factor.
Made = tuple[Call, Callable[[], Call], Callable[[], Answer], int, Sequence[float]]


def _sum_n(tensors: list[Tensor], spec: Spec, options: dict[str, Any]) -> Made:
    def expected() -> Answer:
        magnitude = torch.zeros(tensors[0].numel(), dtype=torch.float64, device=DEVICE)
        for tensor in tensors:
            magnitude += tensor.abs()
        return kernels.sum_n_reference(tensors, scale=spec.scale), magnitude.mul_(abs(spec.scale))

    options |= {"order": spec.order, "accumulate": spec.accumulate}
    return (
        partial(kernels.sum_n, tensors, scale=spec.scale, **options),
        lambda: partial(kernels.plan_sum_n(tensors, **options), spec.scale),
        expected,
        kernels.sum_n_bytes(tensors, dtype=spec.out),
        [spec.scale] * len(tensors),
    )


def _scaled_add(tensors: list[Tensor], spec: Spec, options: dict[str, Any]) -> Made:
    a, b = tensors
    reference = partial(kernels.scaled_add_reference, alpha=ALPHA, beta=BETA)
    return (
        partial(kernels.scaled_add, a, b, alpha=ALPHA, beta=BETA, **options),
        lambda: partial(kernels.plan_scaled_add(a, b, **options), ALPHA, BETA),
        lambda: (reference(a, b), reference(a.abs(), b.abs())),
        kernels.scaled_add_bytes(a, b, dtype=spec.out),
        [ALPHA, BETA],
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_reduction(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
