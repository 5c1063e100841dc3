"""The peers of the projection: the same formulas in plain torch, for one segment and for many.

torch.dot sums in float32 at best and rounds to the tensors' dtype: a caveat says so, and the bound
takes its n roundings to be independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.kernels import peers_compiled
from bench.kernels.case import Contender

THREE_DOTS, EAGER = "three torch.dot", "eager"
SUMS = "sums in float32: squares of large values overflow, those of small ones vanish"
_CANCELS = "dots from |a + b|, which cancel"


class Pair:
    """The job of the projection's peers: a, b and out, 1-D, whole and split at `bounds`."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor, bounds: Sequence[int]) -> None:
        spans = list(itertools.pairwise(bounds))
        self.a, self.b, self.out = a, b, out
        self.many = len(spans) > 1
        # None for one segment, as a caller without a list passes it.
        self.segments = tuple(bounds) if self.many else None
        self.a_parts, self.b_parts, self.out_parts = (
            [whole[low:high] for low, high in spans] for whole in (a, b, out)
        )

    @property
    def slack(self) -> float:
        """Error of a sum of n products in float32 and of a few roundings to the dtype."""
        eps = torch.finfo(torch.float32).eps
        return math.sqrt(self.a.numel()) * eps + 8 * torch.finfo(self.a.dtype).eps


def _dots(a: Tensor, b: Tensor) -> list[Tensor]:
    return [torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)]


def _foreach_dots(job: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Return a.b, |a|^2 and |b|^2 as [S] tensors, from three multi-tensor norms."""
    both = torch._foreach_norm(torch._foreach_add(job.a_parts, job.b_parts))
    norms = [torch._foreach_norm(parts) for parts in (job.a_parts, job.b_parts)]
    total, left, right = (torch.stack(list(each)).square() for each in (both, *norms))
    return (total - left - right) / 2, left, right


def dot_and_norms(job: Pair) -> list[Contender]:
    def each() -> Tensor:
        return torch.stack(
            [dot for a, b in zip(job.a_parts, job.b_parts, strict=True) for dot in _dots(a, b)]
        )

    def doubles() -> Tensor:
        return torch.stack(_dots(job.a.double(), job.b.double()))

    def foreach() -> Tensor:
        return torch.stack(_foreach_dots(job), 1)

    def flat(result: Tensor) -> list[Tensor]:
        return [result.reshape(-1)]

    peers = [Contender(THREE_DOTS, each, job.slack, flat, caveat=SUMS)]
    if job.many:
        return [*peers, Contender("_foreach_norm", foreach, job.slack, flat, caveat=_CANCELS)]
    return [*peers, Contender("three torch.dot in float64", doubles, job.slack, flat)]


def _one_by_one(job: Pair, coefficients: Sequence[tuple[Tensor, Tensor]]) -> None:
    parts = zip(job.a_parts, job.b_parts, job.out_parts, coefficients, strict=True)
    for a, b, out, (alpha, beta) in parts:
        torch.mul(a, alpha, out=out).addcmul_(b, beta)


def _multi_tensor(job: Pair, alphas: Tensor, betas: Tensor) -> list[Tensor]:
    results = torch._foreach_mul(job.a_parts, list(alphas.unbind()))
    torch._foreach_addcmul_(results, job.b_parts, list(betas.unbind()))
    return list(results)


def combine(job: Pair, dots: Tensor, bound: float) -> list[Contender]:
    """Return the peers of combine; dots: float64 [S, 3], bound: the kernel's."""
    bound += 8 * torch.finfo(job.a.dtype).eps

    def coefficients() -> Tensor:
        return (1 - dots[:, :1] / (2 * dots[:, 1:])).to(job.a.dtype)

    def one_by_one() -> Tensor:
        _one_by_one(job, [(row[0], row[1]) for row in coefficients()])
        return job.out

    def foreach() -> list[Tensor]:
        return _multi_tensor(job, *coefficients().unbind(1))

    peers = [Contender("mul, addcmul_", one_by_one, bound, written=[job.out])]
    if job.many:
        peers.append(Contender("_foreach_mul", foreach, bound, _joined))
    return peers


def _joined(results: list[Tensor]) -> list[Tensor]:
    return [torch.cat(results)]


def _formula(a: Tensor, b: Tensor) -> Tensor:
    """Compute Adasum of one segment as in the paper, in float32."""
    x, y = a.float(), b.float()
    dot, norm_a, norm_b = ((u * v).sum() for u, v in ((x, y), (x, x), (y, y)))
    return ((1 - dot / (2 * norm_a)) * x + (1 - dot / (2 * norm_b)) * y).to(a.dtype)


def adasum(job: Pair, bound: float) -> list[Contender]:
    """Return the peers of adasum; bound: the kernel's."""
    bound += job.slack

    def dots_first() -> Tensor:
        rows = [_dots(a, b) for a, b in zip(job.a_parts, job.b_parts, strict=True)]
        _one_by_one(job, [(1 - d / (2 * p), 1 - d / (2 * q)) for d, p, q in rows])
        return job.out

    def foreach() -> list[Tensor]:
        dot, norm_a, norm_b = _foreach_dots(job)
        return _multi_tensor(job, 1 - dot / (2 * norm_a), 1 - dot / (2 * norm_b))

    peers = [Contender(f"{EAGER}, torch.dot", dots_first, bound, written=[job.out], caveat=SUMS)]
    if job.many:
        name = f"{EAGER}, _foreach"
        return [*peers, Contender(name, foreach, bound, _joined, caveat=_CANCELS)]
    formula = f"{EAGER}, (x * y).sum()"
    return [*peers, Contender(formula, lambda: _formula(job.a, job.b), bound, caveat=SUMS)]


def compiled(job: Pair, bound: float) -> Contender:
    """Return the formula through torch.compile, specialised on this size; bound: the kernel's."""
    call = peers_compiled.compiled(_formulas, job.a_parts, job.b_parts, tensors=len(job.a_parts))
    return Contender(peers_compiled.COMPILED, call, bound + job.slack, _joined, caveat=SUMS)


def _formulas(a_parts: list[Tensor], b_parts: list[Tensor]) -> list[Tensor]:
    return [_formula(a, b) for a, b in zip(a_parts, b_parts, strict=True)]
