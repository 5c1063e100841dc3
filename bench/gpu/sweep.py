"""Checks of a device's kernels, in three sizes.

    python -m bench.gpu.sweep [--sizes 1 5003 70001]     # KERNELS, as under a sanitizer

Each takes a device and the sizes, and raises if something is wrong. Kernels are compared with
their float64 references on fresh random numbers, with outputs of NaN, in all dtypes, on tensors
that begin on a 16-byte boundary and one element off it. Those of `KERNELS` run on CPU tensors, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import kernels
from bench.kernels.bounds import dots_bound, magnitudes, rounding

Check = Callable[[str, Sequence[int]], None]
# Odd, so that every kernel has a tail; the largest takes adasum's other path on every GPU.
SIZES = (1, 100_003, 9_000_001)


def _normal(numel: int, dtype: torch.dtype, device: str, misaligned: bool = False) -> Tensor:
    """Return fresh random values; misaligned: one element off a 16-byte boundary."""
    values = torch.randn(numel + misaligned, device=device).to(dtype)
    return values[int(misaligned) :]


def _nan_like(tensor: Tensor, misaligned: bool) -> Tensor:
    """Return memory to write to, which is NaN so far."""
    base = torch.full((tensor.numel() + misaligned,), math.nan, dtype=tensor.dtype)
    return base.to(tensor.device)[int(misaligned) :]


def _compare(what: str, got: Tensor, want: Tensor, scale: Tensor, bound: float) -> None:
    """Raise unless |got - want| <= bound * scale and a subnormal, everywhere."""
    finfo = torch.finfo(got.dtype)
    allowed = bound * scale.abs() + finfo.smallest_normal * finfo.eps
    # A NaN is not below anything, so it is wrong, too.
    wrong = ((got.double() - want).abs() <= allowed).logical_not()
    if wrong.any():
        i = int(wrong.view(-1).nonzero()[0])
        raise AssertionError(
            f"{what}: element {i} is {got.reshape(-1)[i].item():.9g}, float64 gives "
            f"{want.reshape(-1)[i].item():.9g}; {int(wrong.sum())} of {wrong.numel()} are wrong"
        )


# Of each result: what came out, what float64 gives, a scale, and the bound of the error over it.
Found = Iterator[tuple[Tensor, Tensor, Tensor, float]]
# Takes two tensors, an output of NaN and odd segments.
Kernel = Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], Found]


def _check_all(kernel: Kernel, device: str, sizes: Sequence[int]) -> None:
    """Hold a kernel against float64 in all dtypes and sizes, aligned and not."""
    for dtype in kernels.DTYPES:
        for numel in sizes:
            for misaligned in (False, True):
                a, b = (_normal(numel, dtype, device, misaligned) for _ in range(2))
                cuts = (0, numel // 7, numel // 7, numel // 2, numel)
                what = f"{dtype}, {numel} elements, {'mis' * misaligned}aligned"
                for found in kernel(a, b, _nan_like(a, misaligned), cuts):
                    _compare(what, *found)


def _pack(a: Tensor, b: Tensor, _: Tensor, cuts: tuple[int, ...]) -> Found:
    tensors = [a, b, a[: a.numel() // 3]]
    layout = kernels.layout_of(tensors)
    out = _nan_like(a.new_empty(layout.numel), False)
    kernels.pack(tensors, layout=layout, out=out, scale=0.3)
    want = kernels.pack_reference(tensors, layout=layout, scale=0.3)
    yield out, want, want, rounding(a.dtype, 1)


def _unpack(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    layout = kernels.layout_of([a, b])
    buffer = _normal(layout.numel, a.dtype, str(a.device))
    outs = [out, _nan_like(b, False)]
    kernels.unpack(buffer, outs, layout=layout, scale=0.3)
    wants = kernels.unpack_reference(buffer, layout, scale=0.3)
    for got, want in zip(outs, wants, strict=True):
        yield got, want.view(-1), want.view(-1), rounding(a.dtype, 1)


def _sum_n(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    tensors = [a, b, _normal(a.numel(), a.dtype, str(a.device))]
    found = torch.zeros((), device=a.device)
    kernels.sum_n(tensors, out=out, scale=0.3, found_inf=found)
    want = kernels.sum_n_reference(tensors, scale=0.3)
    scale = kernels.sum_n_reference([each.abs() for each in tensors], scale=0.3)
    yield out, want, scale, rounding(a.dtype, 3)
    if found.item():
        raise AssertionError(f"{a.dtype}: found_inf is set, and every value is finite")


def _scaled_add(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    kernels.scaled_add(a, b, alpha=0.3, beta=-0.6, out=out)
    want = kernels.scaled_add_reference(a, b, alpha=0.3, beta=-0.6)
    scale = kernels.scaled_add_reference(a.abs(), b.abs(), alpha=0.3, beta=0.6)
    yield out, want, scale, rounding(a.dtype, 2)


def _dot_and_norms(a: Tensor, b: Tensor, _: Tensor, cuts: tuple[int, ...]) -> Found:
    for segments in (None, cuts):
        want = kernels.dot_and_norms_reference(a, b, segments)
        scale = want.clone()
        scale[:, 0] = (want[:, 1] * want[:, 2]).sqrt()
        yield kernels.dot_and_norms(a, b, segments), want, scale, dots_bound(a.dtype, a.numel())


def _combine(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    for segments in (None, cuts):
        dots = kernels.dot_and_norms_reference(a, b, segments)
        kernels.combine(a, b, dots, segments, out=out.fill_(math.nan))
        want = kernels.combine_reference(a, b, dots, segments)
        yield out, want, magnitudes(a, b, dots, segments), rounding(a.dtype, 2)


def _adasum(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    # Segments that begin on 16-byte boundaries may take one launch where others take two.
    even = (0, *(each // 8 * 8 for each in cuts[1:-1]), a.numel())
    for segments in (None, even, cuts):
        kernels.adasum(a, b, segments, out=out.fill_(math.nan))
        dots = kernels.dot_and_norms_reference(a, b, segments)
        want = kernels.combine_reference(a, b, dots, segments)
        bound = rounding(a.dtype, 2) + dots_bound(a.dtype, a.numel())
        yield out, want, magnitudes(a, b, dots, segments), bound


def _gram(a: Tensor, b: Tensor, _: Tensor, cuts: tuple[int, ...]) -> Found:
    tensors = [a, b, a + b]
    for segments in (None, cuts):
        want = kernels.gram_reference(tensors, segments)
        lengths = want.diagonal(dim1=1, dim2=2).sqrt()
        scale = lengths[:, :, None] * lengths[:, None]
        # Sums are float64's, whatever the dtype.
        bound = dots_bound(torch.float64, a.numel())
        yield kernels.gram(tensors, segments), want, scale, bound
        found = kernels.gram(tensors, segments, precise=True)
        yield found.sum(3), want, scale, bound


def _weighted_sum(a: Tensor, b: Tensor, out: Tensor, cuts: tuple[int, ...]) -> Found:
    pair = ((0, 1, 1, 1),)
    for segments in (None, cuts):
        matrices = kernels.gram([a, b], segments)
        coefficients = kernels.adasum_coefficients(matrices[None], pair)
        kernels.weighted_sum([a, b], coefficients, segments, out=out.fill_(math.nan))
        dots = kernels.dot_and_norms_reference(a, b, segments)
        want = kernels.combine_reference(a, b, dots, segments)
        bound = rounding(a.dtype, 2) + dots_bound(torch.float64, a.numel())
        yield out, want, magnitudes(a, b, dots, segments), bound


KERNELS: dict[str, Check] = {
    kernel.__name__[1:]: partial(_check_all, kernel)
    for kernel in (
        *(_pack, _unpack, _sum_n, _scaled_add, _dot_and_norms, _combine, _adasum),
        *(_gram, _weighted_sum),
    )
}


def main() -> None:
    """Run every check of KERNELS, on a GPU."""
    parser = argparse.ArgumentParser("bench.gpu.sweep")
    parser.add_argument("--sizes", type=int, nargs=3, default=SIZES)
    sizes = parser.parse_args().sizes
    for name, check in KERNELS.items():
        check("cuda", sizes)
        print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main()
