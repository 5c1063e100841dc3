"""Dot products of long tensors on CPUs, which are taken by rows: lengths, ranges, bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernels
from kernels import _cpu_dots

ROW, FROM, BLOCK = _cpu_dots._ROW, _cpu_dots._ROWS_FROM, _cpu_dots._ROWS_BLOCK
EPS = torch.finfo(torch.float32).eps


def pair(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    a, b = (torch.randn(numel, generator=generator) for _ in range(2))
    return a, b


def close(a: torch.Tensor, b: torch.Tensor, cuts: tuple[int, ...] | None = None) -> None:
    """Off by a row's roundings in float32 at most, whatever was done in float64.

    torch adds a row's 1,024 terms, each rounded once, in at least eight lanes: none passes through
    more than 128 additions and the three that join the lanes. A norm is a root, squared again:
    three roundings more.
    """
    cuts = (0, a.numel()) if cuts is None else cuts
    dots = kernels.dot_and_norms(a, b, cuts)
    expected = kernels.dot_and_norms_reference(a, b, cuts)
    norms = expected[:, 1:].sqrt()
    reach = torch.stack([norms[:, 0] * norms[:, 1], *expected[:, 1:].unbind(1)], 1)
    assert ((dots - expected).abs() <= 135 * EPS * reach).all()


@pytest.mark.parametrize("numel", [FROM - 1, FROM, FROM + 1, BLOCK + ROW - 1, 2 * BLOCK + ROW + 3])
def test_every_length(numel: int) -> None:
    close(*pair(numel))


def test_long_and_short_segments_in_any_order() -> None:
    lengths = [5, 0, FROM, FROM + 77, 1, BLOCK + 1, 0, 3000, FROM]
    cuts = (0, *itertools.accumulate(lengths))
    a, b = pair(cuts[-1])
    close(a, b, cuts)
    # A segment's answer is its own, whatever stands beside it.
    dots = kernels.dot_and_norms(a, b, cuts)
    for row, low, high in zip(dots, cuts, cuts[1:], strict=False):
        if high - low >= FROM:
            assert torch.equal(row, kernels.dot_and_norms(a[low:high], b[low:high])[0])


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 2.0**-49, 1.0, 2.0**57, 1e19, 3e37])
def test_every_size_of_the_elements(scale: float) -> None:
    a, b = pair(FROM + 5)
    close(a * scale, b)
    close(a * scale, b * scale)


def test_one_row_out_of_range_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, tiny and huge elements, alone in one operand: float64 sees the block."""
    taken: list[bool] = []
    real = _cpu_dots._row_dots

    def watched(x: torch.Tensor, y: torch.Tensor) -> list[float] | None:
        answer = real(x, y)
        taken.append(answer is not None)
        return answer

    monkeypatch.setattr(_cpu_dots, "_row_dots", watched)
    close(*pair(BLOCK))
    for value in (0.0, 1e-20, 1e25):
        a, b = pair(BLOCK)
        b[7 * ROW : 8 * ROW] = value
        close(a, b)
        close(b, a)
    assert taken == [True] + 6 * [False]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(value: float) -> None:
    a, b = pair(FROM)
    a[3] = value
    dots = kernels.dot_and_norms(a, b)[0]
    expected = kernels.dot_and_norms_reference(a, b)[0]
    assert torch.equal(dots[:2].isnan(), expected[:2].isnan()) and not dots[:2].isfinite().any()
    assert dots[2] == pytest.approx(expected[2].item(), rel=135 * EPS)


def test_bits_depend_on_neither_place_nor_threads() -> None:
    numel = FROM + 3 * ROW
    a, b = pair(numel)
    threads = torch.get_num_threads()
    seen = set()
    try:
        for place, count in itertools.product(range(0, 16, 3), (1, 2, 3)):
            torch.set_num_threads(count)
            x = torch.empty(numel + 16)[place : place + numel].copy_(a)
            y = torch.empty(numel + 16)[16 - place :][:numel].copy_(b)
            seen.add(tuple(kernels.dot_and_norms(x, y)[0].tolist()))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1
