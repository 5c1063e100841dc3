"""torch.compile as a peer: the same functions in plain torch, compiled for the row's shapes.

Each is compiled at its first call, so that what cannot be is left out with the compiler's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import Contender
from bench.kernels.peers_elementwise import Job, Packing, Reduction
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


def pack(job: Packing) -> Contender:
    """Return packing into the target, end to end."""

    def function(given: list[Tensor], out: Tensor, flag: Tensor | None) -> None:
        whole = torch.cat([each.reshape(-1) for each in given])
        scaled = (whole.float() * job.scale).to(out.dtype)
        _note(flag, scaled)
        out.copy_(scaled)

    pieces = list(job.target.split([each.numel() for each in job.tensors]))
    return _contender(job, function, pieces, [job.target], len(job.tensors))


def unpack(job: Packing) -> Contender:
    """Return unpacking from the target, end to end."""
    sizes, scale = [each.numel() for each in job.tensors], job.scale

    def function(given: list[Tensor], source: Tensor, flag: Tensor | None) -> None:
        parts = [(part.float() * scale).to(given[0].dtype) for part in source.split(sizes)]
        _note(flag, *parts)
        for target, part in zip(given, parts, strict=True):
            target.copy_(part.view(target.shape))

    flat = [each.view(-1) for each in job.tensors]
    return _contender(job, function, flat, flat, len(flat))


def weighted_sum(job: Reduction, factors: Sequence[float]) -> Contender:
    """Return the sum of factor times tensor, each widened first."""

    def function(given: list[Tensor], out: Tensor, flag: Tensor | None) -> None:
        total = given[0].float() * factors[0]
        for each, factor in zip(given[1:], factors[1:], strict=True):
            total = total + each.float() * factor
        result = total.to(out.dtype)
        _note(flag, result)
        out.copy_(result)

    return _contender(job, function, [job.target], [job.target])


def _contender(
    job: Job,
    function: Callable[[list[Tensor], Tensor, Tensor | None], None],
    answer: list[Tensor],
    written: list[Tensor],
    tensors: int = 1,
) -> Contender:
    call = compiled(function, job.tensors, job.target, job.flag, tensors=tensors)
    return Contender(COMPILED, call, job.bound, lambda _: answer, written)


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
