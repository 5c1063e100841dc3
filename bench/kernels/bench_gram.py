"""gram and weighted_sum, and their plans, beside the same in torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import kernels
from bench.kernels import case, inputs
from bench.kernels.bounds import rounding
from bench.kernels.case import Answer, Case, Contender
from bench.kernels.inputs import PLANNED, normal, size_label
from bench.kernels.peers_projection import SUMS
from bench.kernels.timing import DEVICE, Call
from bench.shapes import MODELS

FP32, BF16 = torch.float32, torch.bfloat16
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Spec(case.Spec):
    """One row.

    Attributes:
        size: Bytes of one tensor.
        count: How many tensors.
        dtype: Of the tensors.
        model: The model whose tensors are the segments, "" for one segment.
    """

    size: int = 0
    count: int = 2
    dtype: torch.dtype = FP32
    model: str = ""


def _specs() -> Iterator[Spec]:
    for kernel in ("gram", "weighted_sum"):
        for count in (2, 4, 8):
            # All tensors together are as large as other kernels' rows.
            for size in inputs.SIZES:
                label = f"n={count} {size_label(size // count)}"
                yield Spec(kernel, f"n={count}", label, size=size // count, count=count)
        for count in (3, 5, 16):
            size = inputs.FEW_SIZES[-1] // 16
            label = f"n={count} {size_label(size)}, others"
            yield Spec(kernel, "others", label, size=size, count=count)
        for size in inputs.FEW_SIZES:
            label = f"n=8, bf16 {size_label(size // 8)}"
            yield Spec(kernel, "n=8, bf16", label, size=size // 8, count=8, dtype=BF16)
        label = f"n=8, ResNet-50 ({len(MODELS['ResNet-50'])} segments)"
        yield Spec(kernel, "segments", label, count=8, model="ResNet-50")
        for size in inputs.PLAN_SIZES:
            label = f"{PLANNED} {size_label(size)}"
            yield Spec(kernel, PLANNED, label, size=size, count=8, planned=True)


SPECS = list(_specs())


@dataclass(frozen=True)
class Job:
    """What a row's kernel is given."""

    tensors: list[Tensor]
    bounds: tuple[int, ...]

    @property
    def parts(self) -> list[list[Tensor]]:
        """The tensors of each segment."""
        spans = itertools.pairwise(self.bounds)
        return [[one[low:high] for one in self.tensors] for low, high in spans]


# Ours, what makes a plan, the peers, the answer and the traffic.
Made = tuple[Contender, Callable[[], Call], list[Contender], Callable[[], Iterator[Answer]], int]


def _gram(job: Job) -> Made:
    count = len(job.tensors)
    direct = partial(kernels.gram, job.tensors, job.bounds)
    plan = partial(kernels.plan_gram, job.tensors, job.bounds)
    numel = job.bounds[-1]

    def make() -> Iterator[Answer]:
        # Pair by pair, so that float64 copies of all tensors need not fit.
        matrices = torch.empty(len(job.parts), count, count, dtype=torch.float64, device=DEVICE)
        for i, j in itertools.combinations_with_replacement(range(count), 2):
            pair = [job.tensors[i], job.tensors[j]]
            dots = kernels.dot_and_norms_reference(*pair, job.bounds)
            matrices[:, i, j] = matrices[:, j, i] = dots[:, 0]
        lengths = matrices.diagonal(dim1=1, dim2=2).sqrt()
        yield matrices.view(-1), (lengths[:, :, None] * lengths[:, None]).reshape(-1)

    def products(dtype: torch.dtype) -> Tensor:
        found = []
        for part in job.parts:
            rows = torch.stack([one.to(dtype) for one in part])
            found.append(rows @ rows.T)
        return torch.stack(found)

    # A rounding for every doubling, and one for each of the sums of a thread.
    ours = Contender("ours", direct, (64 + math.log2(numel)) * EPS, lambda m: [m.view(-1)])
    # float32 may be taken for TF32's ten bits.
    coarse = math.sqrt(numel) * torch.finfo(FP32).eps + 2.0**-10
    peers = [
        Contender("stack, matmul in float64", partial(products, torch.float64), numel * EPS),
        Contender("stack, matmul in float32", partial(products, FP32), coarse, caveat=SUMS),
    ]
    return ours, plan, peers, make, kernels.gram_bytes(job.tensors, job.bounds)


def _weighted_sum(job: Job) -> Made:
    tensors, count = job.tensors, len(job.tensors)
    dtype, out = tensors[0].dtype, torch.empty_like(tensors[0])
    factors = normal((len(job.parts), count)).double()
    arguments = tensors, factors, job.bounds
    direct = partial(kernels.weighted_sum, *arguments, out=out)
    plan = partial(kernels.plan_weighted_sum, *arguments, out=out)
    narrow, parts = factors.to(FP32), job.parts

    def make() -> Iterator[Answer]:
        yield (
            kernels.weighted_sum_reference(*arguments),
            kernels.weighted_sum_reference(
                [one.abs() for one in tensors], factors.abs(), job.bounds
            ),
        )

    def chain() -> Tensor:
        for row, part, to in zip(narrow, parts, _cut(out, job.bounds), strict=True):
            torch.mul(part[0], row[0], out=to)
            for factor, one in zip(row[1:], part[1:], strict=True):
                to.addcmul_(one, factor.to(dtype))
        return out

    ours = Contender("ours", direct, rounding(dtype, count), written=[out])
    # Each step rounds to the dtype, and so does each factor.
    bound = rounding(dtype, count) + 2 * count * torch.finfo(dtype).eps
    peers = [Contender("mul, addcmul_", chain, bound, written=[out])]
    return ours, plan, peers, make, kernels.weighted_sum_bytes(tensors, job.bounds)


def _cut(out: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    return [out[low:high] for low, high in itertools.pairwise(bounds)]


def case_of(spec: Spec, compiled: bool = False) -> Case:
    """Return the case of a row; torch.compile is no peer."""
    bounds: tuple[int, ...] = (0, spec.size // spec.dtype.itemsize)
    if spec.model:
        shapes = MODELS[spec.model]
        bounds = kernels.layout_of([torch.empty(shape, device=DEVICE) for shape in shapes]).segments
    tensors = [normal(bounds[-1], spec.dtype) for _ in range(spec.count)]
    make = _gram if spec.kernel == "gram" else _weighted_sum
    ours, plan, peers, answers, traffic = make(Job(tensors, bounds))
    row = Case(
        spec,
        size=tensors[0].nbytes,
        traffic=traffic,
        elements=bounds[-1],
        tensors=len(bounds) - 1,
        ours=ours,
        peers=peers,
        expected=cache(lambda: list(answers())),
        reads=spec.kernel == "gram",
        plan=plan,
    )
    return case.completed(iter([row]), compiled)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gram(spec: Spec, record: Callable[[Case], None]) -> None:
    record(case_of(spec))
