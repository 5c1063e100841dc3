"""The peers of packing and reduction: what a user of plain torch would write instead.

Each has its best form: memory to write into, views made in advance, and for packing a buffer
without padding; what moves more bytes than another one here in every row is left out. A peer's
bound is the kernel's unless its arithmetic is coarser; then it has a caveat, too. torch's private
functions are here because users are advised to use them: `torch._foreach_*` are the successors of
apex's multi-tensor kernels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from bench.kernels.case import Contender
from bench.kernels.timing import Call

CHAIN = "chain of adds"


@dataclass(frozen=True)
class Job:
    """What a peer is to do beside moving or adding.

    target: 1-D, the output, or the buffer, with the tensors end to end without padding; scale: the
    factor; flag: float32 of one element, set for non-finite values, None where not asked for;
    bound: the kernel's.
    """

    target: Tensor
    scale: float
    flag: Tensor | None
    bound: float
    tensors: list[Tensor]

    def with_second_pass(self, name: str, first: Call, written: list[Tensor]) -> tuple[str, Call]:
        """Return a name and a call: `first`, then scaling in place of what it wrote.

        With a flag as GradScaler does it, which checks for Inf and NaN; without either, as it is.
        """
        if self.flag is not None:
            factor = torch.tensor(self.scale, device=self.flag.device)
            check = torch._amp_foreach_non_finite_check_and_unscale_
            suffix, second = " + amp check", partial(check, written, self.flag, factor)
        elif self.scale != 1.0:
            suffix, second = " + mul_", partial(torch._foreach_mul_, written, self.scale)
        else:
            return name, first

        def both() -> None:
            first()
            second()

        return name + suffix, both


class Packing(Job):
    """The job of the packing peers."""

    @property
    def casts(self) -> bool:
        return self.tensors[0].dtype != self.target.dtype

    def copies(self, flat: list[Tensor], pieces: list[Tensor], packing: bool) -> list[Contender]:
        """Return `_foreach_copy_` with the scale after it, and tensors multiplied one by one."""
        sources, targets = (flat, pieces) if packing else (pieces, flat)
        whole = [self.target] if packing else flat
        copy = partial(torch._foreach_copy_, targets, sources)
        peers = [self.contender("_foreach_copy_", copy, targets, whole)]
        if self.scale == 1.0 or self.flag is not None:
            return peers

        def one_by_one() -> None:
            for source, target in zip(sources, targets, strict=True):
                torch.mul(source, self.scale, out=target)

        # It multiplies in the dtype of the source.
        coarse = torch.finfo(sources[0].dtype).eps > torch.finfo(targets[0].dtype).eps
        bound = self.bound + coarse * torch.finfo(sources[0].dtype).eps
        caveat = "rounds to the narrow dtype before it widens" if coarse else ""
        name = "torch.mul, one by one"
        peers.append(Contender(name, one_by_one, bound, lambda _: targets, targets, caveat=caveat))
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
        twice = self.scale != 1.0 and self.casts
        return Contender(
            *self.with_second_pass(name, copy, written),
            self.bound + twice * torch.finfo(written[0].dtype).eps,
            lambda _: answer,
            written,
            capturable=capturable,
            caveat="rounds before it scales and after" if twice else "",
        )


def pack(job: Packing) -> list[Contender]:
    flat = [tensor.view(-1) for tensor in job.tensors]
    pieces = list(job.target.split([tensor.numel() for tensor in flat]))
    row, whole = job.target.view(1, -1), [job.target]
    concatenate = partial(torch.cat, flat, out=job.target)
    chunk_cat = partial(torch._chunk_cat, flat, 0, 1, out=row)
    return [
        job.contender("torch.cat", concatenate, pieces, whole),
        *job.copies(flat, pieces, packing=True),
        # Not capturable: it uploads a table in each call, from memory that is freed afterwards.
        job.contender("_chunk_cat", chunk_cat, pieces, whole, capturable=False),
    ]


def unpack(job: Packing) -> list[Contender]:
    flat = [tensor.view(-1) for tensor in job.tensors]
    sizes = [tensor.numel() for tensor in flat]
    peers = job.copies(flat, list(job.target.split(sizes)), packing=False)
    if not job.casts:
        # As _chunk_cat; newer versions take another, slower path inside a capture instead.
        split = partial(torch.split_with_sizes_copy, job.target, sizes, 0, out=flat)
        peers.append(job.contender("split_with_sizes_copy", split, flat, flat, capturable=False))
    return peers


@dataclass(frozen=True)
class Reduction(Job):
    """The job of the reduction peers: what `kernels.sum_n` and `kernels.scaled_add` are given.

    coarse: the bound of a peer that rounds to a narrow dtype in between.
    """

    coarse: float

    def contender(self, name: str, fill: Call, rounds: bool) -> Contender:
        """Return `fill` of the output, then a second pass where the job has a scale or a flag.

        rounds: whether `fill` rounds more than once to a dtype narrower than float32.
        """
        second = self.scale != 1.0 or self.flag is not None
        rounds = rounds or (second and _narrow(self.target))
        return Contender(
            *self.with_second_pass(name, fill, [self.target]),
            self.coarse if rounds else self.bound,
            lambda _: [self.target],
            [self.target],
            caveat="rounds to the narrow dtype more than once" if rounds else "",
        )


def _narrow(*tensors: Tensor) -> bool:
    return any(tensor.element_size() < 4 for tensor in tensors)


def sum_n(job: Reduction) -> list[Contender]:
    tensors, out = job.tensors, job.target
    widens = out.element_size() > tensors[0].element_size()
    narrows = out.element_size() < tensors[0].element_size()

    def chain() -> None:
        torch.add(reduce(operator.add, tensors[:-1]), tensors[-1], out=out)

    def in_place() -> None:
        if widens:
            total = out.copy_(tensors[0]).add_(tensors[1])
        else:
            total = torch.add(tensors[0], tensors[1], out=None if narrows else out)
        for tensor in tensors[2:]:
            total.add_(tensor)
        if narrows:
            out.copy_(total)

    return [
        job.contender(CHAIN, chain, _narrow(tensors[0])),
        job.contender("in-place adds", in_place, _narrow(tensors[0]) and not widens),
    ]


def scaled_add(job: Reduction, alpha: float, beta: float) -> list[Contender]:
    (a, b), out = job.tensors, job.target

    ways: dict[str, Call] = {
        "mul, add_": lambda: torch.mul(a, alpha, out=out).add_(b, alpha=beta),
        "add of a product": lambda: torch.add(a * alpha, b, alpha=beta, out=out),
    }
    return [job.contender(name, fill, _narrow(a, out)) for name, fill in ways.items()]
