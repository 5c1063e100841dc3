"""The peers of packing and reduction: what a user of plain torch would write instead.

Each has its best form: memory to write into, views made in advance, and for packing a buffer
without padding. A peer's bound is the kernel's unless its arithmetic is coarser; then it has a
caveat, too. torch's private functions are here because users are told to use them:
`torch._foreach_*` are the successors of apex's multi-tensor kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bench.kernels.case import Contender
from bench.kernels.timing import Call


class Second(NamedTuple):
    """A pass over what another call wrote, and the name to append to that call's."""

    name: str
    call: Call | None

    def after(self, first: Call) -> Call:
        second = self.call
        if second is None:
            return first

        def both() -> None:
            first()
            second()

        return both


def second_pass(written: list[Tensor], scale: float, flag: Tensor | None) -> Second:
    """Return scaling in place; with a flag, as GradScaler does it, which checks for Inf and NaN."""
    if flag is not None:
        factor = torch.tensor(scale, device=flag.device)
        unscale = torch._amp_foreach_non_finite_check_and_unscale_
        return Second(" + amp check", partial(unscale, written, flag, factor))
    if scale != 1.0:
        return Second(" + mul_", partial(torch._foreach_mul_, written, scale))
    return Second("", None)


@dataclass(frozen=True)
class Packing:
    """The job of the packing peers.

    Attributes:
        tensors: The tensors.
        buffer: 1-D, with the tensors end to end without padding.
        scale: The factor.
        flag: float32 of one element, set for non-finite values; None where not asked for.
        bound: The kernel's.
    """

    tensors: list[Tensor]
    buffer: Tensor
    scale: float
    flag: Tensor | None
    bound: float

    @property
    def casts(self) -> bool:
        return self.tensors[0].dtype != self.buffer.dtype

    def copies(self, flat: list[Tensor], pieces: list[Tensor], packing: bool) -> list[Contender]:
        """Return `_foreach_copy_` with the scale before it, after it or instead of it."""
        sources, targets = (flat, pieces) if packing else (pieces, flat)
        whole = [self.buffer] if packing else flat
        peers = [
            self.contender(
                "_foreach_copy_", lambda: torch._foreach_copy_(targets, sources), targets, whole
            )
        ]
        if self.scale == 1.0 or self.flag is not None:
            return peers

        def multiply_first() -> None:
            torch._foreach_copy_(targets, torch._foreach_mul(sources, self.scale))

        def one_by_one() -> None:
            for source, target in zip(sources, targets, strict=True):
                torch.mul(source, self.scale, out=target)

        # Both multiply in the dtype of the source.
        coarse = torch.finfo(sources[0].dtype).eps > torch.finfo(targets[0].dtype).eps
        bound = self.bound + coarse * torch.finfo(sources[0].dtype).eps
        caveat = "rounds to the narrow dtype before it widens" if coarse else ""
        for name, call in (
            ("_foreach_mul + _foreach_copy_", multiply_first),
            ("torch.mul, one by one", one_by_one),
        ):
            peers.append(Contender(name, call, bound, lambda _: targets, targets, caveat=caveat))
        return peers

    def contender(
        self,
        name: str,
        copy: Call,
        answer: list[Tensor],
        written: list[Tensor],
        capturable: bool = True,
    ) -> Contender:
        """Return `copy`, then a second pass over `written` where the job has a scale or a flag."""
        second = second_pass(written, self.scale, self.flag)
        twice = self.scale != 1.0 and self.casts
        return Contender(
            name + second.name,
            second.after(copy),
            self.bound + twice * torch.finfo(written[0].dtype).eps,
            lambda _: answer,
            written,
            capturable=capturable,
            caveat="rounds before it scales and after" if twice else "",
        )


def pack(job: Packing) -> list[Contender]:
    flat = [tensor.view(-1) for tensor in job.tensors]
    sizes = [tensor.numel() for tensor in flat]
    pieces, row, whole = list(job.buffer.split(sizes)), job.buffer.view(1, -1), [job.buffer]

    def chunk_cat() -> None:
        torch._chunk_cat(flat, 0, 1, out=row)

    peers = [
        job.contender("torch.cat", lambda: torch.cat(flat, out=job.buffer), pieces, whole),
        *job.copies(flat, pieces, packing=True),
        # Not capturable: it uploads a table in each call, from memory that is freed afterwards.
        job.contender("_chunk_cat", chunk_cat, pieces, whole, capturable=False),
    ]
    if job.scale == 1.0 and job.flag is None and not job.casts:
        peers.append(
            Contender(
                "_flatten_dense_tensors",
                lambda: _flatten_dense_tensors(job.tensors),
                job.bound,
                lambda result: result.split(sizes),
            )
        )
    return peers


def unpack(job: Packing) -> list[Contender]:
    flat = [tensor.view(-1) for tensor in job.tensors]
    sizes = [tensor.numel() for tensor in flat]

    def unflatten() -> None:
        torch._foreach_copy_(job.tensors, _unflatten_dense_tensors(job.buffer, job.tensors))

    def split() -> None:
        torch.split_with_sizes_copy(job.buffer, sizes, 0, out=flat)

    peers = [
        *job.copies(flat, list(job.buffer.split(sizes)), packing=False),
        job.contender("_unflatten_dense_tensors + _foreach_copy_", unflatten, flat, flat),
    ]
    if not job.casts:
        # As _chunk_cat; newer versions take another, slower path inside a capture instead.
        peers.append(job.contender("split_with_sizes_copy", split, flat, flat, capturable=False))
    return peers


@dataclass(frozen=True)
class Reduction:
    """The job of the reduction peers: what `kernels.sum_n` and `kernels.scaled_add` are given.

    Attributes:
        tensors: The tensors.
        out: The output.
        bound: The kernel's.
        coarse: The bound of a peer that rounds to a narrow dtype in between.
        scale: The factor.
        flag: As in `Packing`.
    """

    tensors: Sequence[Tensor]
    out: Tensor
    bound: float
    coarse: float
    scale: float = 1.0
    flag: Tensor | None = None

    def contender(self, name: str, fill: Call, rounds: bool) -> Contender:
        """Return `fill` of the output, then a second pass where the job has a scale or a flag.

        Args:
            name: Its name.
            fill: The call that fills the output.
            rounds: Whether `fill` rounds more than once to a dtype narrower than float32.
        """
        second = second_pass([self.out], self.scale, self.flag)
        rounds = rounds or (second.call is not None and _narrow(self.out))
        return Contender(
            name + second.name,
            second.after(fill),
            self.coarse if rounds else self.bound,
            lambda _: [self.out],
            [self.out],
            caveat="rounds to the narrow dtype more than once" if rounds else "",
        )


def _narrow(*tensors: Tensor) -> bool:
    return any(tensor.element_size() < 4 for tensor in tensors)


CHAIN = "chain of adds"


def sum_n(job: Reduction) -> list[Contender]:
    tensors, out = list(job.tensors), job.out
    widens = out.element_size() > tensors[0].element_size()
    narrows = out.element_size() < tensors[0].element_size()

    def chain() -> None:
        torch.add(reduce(operator.add, tensors[:-1]), tensors[-1], out=out)

    def in_place() -> None:
        if widens:
            total = out.copy_(tensors[0]).add_(tensors[1])
        elif narrows:
            total = torch.add(tensors[0], tensors[1])
        else:
            total = torch.add(tensors[0], tensors[1], out=out)
        for tensor in tensors[2:]:
            total.add_(tensor)
        if narrows:
            out.copy_(total)

    def stacked() -> None:
        if narrows:
            out.copy_(torch.sum(torch.stack(tensors), 0))
        else:
            torch.sum(torch.stack(tensors), 0, dtype=out.dtype, out=out)

    return [
        job.contender(CHAIN, chain, _narrow(tensors[0])),
        job.contender("in-place adds", in_place, _narrow(tensors[0]) and not widens),
        job.contender("stack().sum()", stacked, False),
    ]


def scaled_add(job: Reduction, alpha: float, beta: float) -> list[Contender]:
    (a, b), out = job.tensors, job.out

    def multiply_add() -> None:
        torch.mul(a, alpha, out=out).add_(b, alpha=beta)

    def add_product() -> None:
        torch.add(a * alpha, b, alpha=beta, out=out)

    def copy_first() -> None:
        out.copy_(a).mul_(alpha).add_(b, alpha=beta)

    def foreach() -> Sequence[Tensor]:
        products = torch._foreach_mul([a], alpha)
        torch._foreach_add_(products, [b], alpha=beta)
        return products

    peers = [
        job.contender("mul, add_", multiply_add, _narrow(a, out)),
        job.contender("add of a product", add_product, _narrow(a, out)),
        job.contender("copy_, mul_, add_", copy_first, _narrow(out)),
    ]
    if a.dtype == out.dtype and job.flag is None:
        coarse = _narrow(a)
        peers.append(
            Contender(
                "_foreach_mul, _foreach_add_",
                foreach,
                job.coarse if coarse else job.bound,
                lambda result: result,
                caveat="rounds to the narrow dtype more than once" if coarse else "",
            )
        )
    return peers
