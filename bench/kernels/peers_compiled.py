"""torch.compile as a peer: the same functions in plain torch, compiled for the row's shapes.

Each is compiled at its first call, so that what cannot be is left out with the compiler's words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import Contender
from bench.kernels.timing import Call

COMPILED = "torch.compile"
# Inductor writes a kernel, or several, for each tensor of a list; for hundreds it takes minutes.
MOST_TENSORS = 64


def compiled(function: Callable[..., Any], *arguments: Any, tensors: int = 1) -> Call:
    """Return a call of the compiled function; RuntimeError at its first for too many tensors."""
    torch.compiler.reset()
    fused = torch.compile(function, fullgraph=True, dynamic=False)

    def call() -> Any:
        if tensors > MOST_TENSORS:
            raise RuntimeError(f"compiling more than {MOST_TENSORS} tensors takes minutes")
        return fused(*arguments)

    return call


def _note(flag: Tensor | None, *results: Tensor) -> None:
    """Set the flag where a result is not finite."""
    if flag is not None:
        finite = torch.stack([torch.isfinite(each).all() for each in results]).all()
        flag.copy_(torch.where(finite, flag, torch.ones_like(flag)))


def pack(
    tensors: Sequence[Tensor], buffer: Tensor, scale: float, flag: Tensor | None, bound: float
) -> Contender:
    """Return packing into `buffer`, end to end."""

    def function(given: list[Tensor], out: Tensor, flag: Tensor | None) -> None:
        whole = torch.cat([each.reshape(-1) for each in given])
        scaled = (whole.float() * scale).to(out.dtype)
        _note(flag, scaled)
        out.copy_(scaled)

    pieces = list(buffer.split([each.numel() for each in tensors]))
    call = compiled(function, list(tensors), buffer, flag, tensors=len(tensors))
    return Contender(COMPILED, call, bound, lambda _: pieces, [buffer])


def unpack(
    tensors: Sequence[Tensor], buffer: Tensor, scale: float, flag: Tensor | None, bound: float
) -> Contender:
    """Return unpacking from `buffer`, end to end."""
    bounds = [0, *itertools.accumulate(each.numel() for each in tensors)]

    def function(given: list[Tensor], source: Tensor, flag: Tensor | None) -> None:
        parts = [
            (source[low:high].float() * scale).to(given[0].dtype)
            for low, high in itertools.pairwise(bounds)
        ]
        _note(flag, *parts)
        for target, part in zip(given, parts, strict=True):
            target.copy_(part.view(target.shape))

    flat = [each.view(-1) for each in tensors]
    call = compiled(function, list(tensors), buffer, flag, tensors=len(tensors))
    return Contender(COMPILED, call, bound, lambda _: flat, flat)


def weighted_sum(
    tensors: Sequence[Tensor],
    factors: Sequence[float],
    out: Tensor,
    flag: Tensor | None,
    bound: float,
) -> Contender:
    """Return out = the sum of factor times tensor, each widened first."""

    def function(given: list[Tensor], out: Tensor, flag: Tensor | None) -> None:
        total = given[0].float() * factors[0]
        for each, factor in zip(given[1:], factors[1:], strict=True):
            total = total + each.float() * factor
        result = total.to(out.dtype)
        _note(flag, result)
        out.copy_(result)

    call = compiled(function, list(tensors), out, flag)
    return Contender(COMPILED, call, bound, lambda _: [out], [out])


def dots(a: Tensor, b: Tensor, slack: float, caveat: str) -> Contender:
    """Return the row (a.b, |a|^2, |b|^2) of one segment, summed in float32."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.float(), b.float()
        return torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()])

    return Contender(
        COMPILED, compiled(function, a, b), slack, lambda result: [result], caveat=caveat
    )


def combine(a: Tensor, b: Tensor, rows: Tensor, out: Tensor, bound: float) -> Contender:
    """Return alpha a + beta b of one segment from its row of dots."""

    def function(a: Tensor, b: Tensor, rows: Tensor, out: Tensor) -> None:
        alpha, beta = (1 - rows[0, :1] / (2 * rows[0, 1:])).float().unbind()
        out.copy_((alpha * a.float() + beta * b.float()).to(out.dtype))

    call = compiled(function, a, b, rows, out)
    return Contender(COMPILED, call, bound, lambda _: [out], [out])
