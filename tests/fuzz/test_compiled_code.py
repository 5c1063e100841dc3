"""Random calls of the kernels' compiled code, in the emulator, against float64."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels
from tests.kernels.cases import DTYPES, assert_close, relative_l2, rounding, tolerance
from tests.ptx_emulator.driver import emulated

pytestmark = pytest.mark.slow

SIZES = (0, 1, 7, 8, 17, 127, 129, 1000, 1023, 1025, 2049, 4999)
SCALES = (1.0, 0.5, 0.3, -2.0, 1 / 7)
GUARD = 9
# Each costs a tenth of a second, and more where a variant has to be compiled.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "16"))


class Draw:
    """Tensors inside memory that nothing may write to, and what was found in them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._memory: list[tuple[Tensor, int, int]] = []
        torch.manual_seed(seed)

    def tensor(self, numel: int, dtype: torch.dtype, *, poison: bool = False) -> Tensor:
        start = self.random.choice((0, 0, 1, 3, 8))
        base = torch.full((start + numel + GUARD,), math.nan, dtype=dtype)
        self._memory.append((base, start, start + numel))
        view = base[start : start + numel]
        return view if poison else view.copy_(torch.randn(numel, dtype=torch.float64))

    def flag(self) -> Tensor | None:
        return self.random.choice((None, torch.zeros(())))

    def cuts(self, numel: int) -> tuple[int, ...]:
        inner = [self.random.randrange(numel + 1) for _ in range(self.random.choice((0, 1, 9)))]
        return (0, *sorted(inner), numel)

    def check(self, flag: Tensor | None, written: Sequence[Tensor]) -> None:
        for base, start, stop in self._memory:
            assert base[:start].isnan().all() and base[stop:].isnan().all()
        finite = all(bool(tensor.isfinite().all()) for tensor in written)
        assert flag is None or bool(flag) == (not finite)


def copies(draw: Draw) -> None:
    kinds = [draw.random.choice(DTYPES) for _ in range(3)]
    tensors = [draw.tensor(draw.random.choice(SIZES), draw.random.choice(kinds)) for _ in range(5)]
    dtype, scale, flag = draw.random.choice(DTYPES), draw.random.choice(SCALES), draw.flag()
    layout = kernels.layout_of(tensors, dtype=dtype)
    buffer = draw.tensor(layout.numel, dtype, poison=True)
    kernels.pack(tensors, layout=layout, scale=scale, out=buffer, found_inf=flag)
    expected = kernels.pack_reference(tensors, layout=layout, scale=scale)
    assert_close(buffer, expected, expected, tolerance(dtype))
    draw.check(flag, [buffer])
    flag = draw.flag()
    into = [draw.tensor(tensor.numel(), tensor.dtype, poison=True) for tensor in tensors]
    kernels.unpack(buffer, into, layout=layout, scale=scale, found_inf=flag)
    for got, want in zip(into, layout.views(buffer), strict=True):
        want = want.double() * scale
        assert_close(got, want, want, tolerance(got.dtype))
    draw.check(flag, into)


def sums(draw: Draw) -> None:
    dtype, to = draw.random.choice(DTYPES), draw.random.choice(DTYPES)
    numel, count = draw.random.choice(SIZES), draw.random.randrange(1, 9)
    scale, flag = draw.random.choice(SCALES), draw.flag()
    tensors = [draw.tensor(numel, dtype) for _ in range(count)]
    whole = torch.stack([tensor.double() for tensor in tensors])
    out = draw.tensor(numel, to, poison=True)
    if dtype == to:
        out = draw.random.choice((out, tensors[0], tensors[-1]))
    order: Literal["list", "tree"] = draw.random.choice(("list", "tree"))
    kernels.sum_n(tensors, out=out, scale=scale, order=order, found_inf=flag)
    bound = tolerance(to, count) + torch.finfo(torch.float32).eps
    assert_close(out, whole.sum(0) * scale, whole.abs().sum(0) * scale, bound)
    draw.check(flag, [out])


def projections(draw: Draw) -> None:
    dtype, numel, flag = draw.random.choice(DTYPES), draw.random.choice(SIZES), draw.flag()
    a, b = draw.tensor(numel, dtype), draw.tensor(numel, dtype)
    cuts = draw.cuts(numel)
    dots = kernels.dot_and_norms(a, b, cuts)
    exact = kernels.dot_and_norms_reference(a, b, cuts)
    lengths = exact[:, 1:].sqrt()
    scale = torch.stack([lengths.prod(1), exact[:, 1], exact[:, 2]], 1)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # As in tests/kernels/test_projection.py: at most 32 products a thread, then a tree.
    bound = (1 + math.log2(max(2, numel)) + 16) * eps
    assert ((dots - exact).abs() <= bound * scale).all()
    expected = kernels.adasum_reference(a, b, cuts)
    out = draw.random.choice((a, b, draw.tensor(numel, dtype, poison=True)))
    kernels.adasum(a, b, cuts, out=out, found_inf=flag)
    draw.check(flag, [out])
    if numel > 17:
        # Short segments may cancel: |a + b| is much less than |a| there.
        assert relative_l2(out, expected) <= 4 * (rounding(dtype) + 4 * bound)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("function", [copies, sums, projections])
def test_random_calls(function, capability):
    with emulated(capability, resident=3) as emulator:
        for seed in range(EXAMPLES):
            function(Draw(seed + capability))
    # Empty tensors launch nothing.
    assert len(emulator.launches) > EXAMPLES / 2
