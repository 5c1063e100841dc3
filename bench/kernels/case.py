"""What one row compares: the kernel, its peers, and the answer that each of them must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.kernels.timing import DEVICE, Call

# The next elements of an answer, end to end: values and magnitudes, 1-D float64; None for |values|.
Answer = tuple[Tensor, Tensor | None]
Expected = Callable[[], Iterable[Answer]]
# Elements compared at once: their float64 forms fit in what the allocator gives without asking the
# system for fresh pages, which on a CPU takes longer than the comparison.
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}[DEVICE]


class WrongAnswer(AssertionError):
    """A result further from float64 than its bound allows: nothing of it is timed."""


def itself(result: Any) -> Sequence[Tensor]:
    return [result]


@dataclass(frozen=True)
class Contender:
    """One way to do the job of a row.

    bound: an element may be off by this times its magnitude, and by one subnormal of its dtype.
    pieces: the tensors of the answer in what `call` returns. written: memory that `call` writes,
    NaN before each check. also: further demands, raising WrongAnswer. capturable: whether a CUDA
    graph may hold it. caveat: why its answer is worth less, if it is.
    """

    name: str
    call: Call
    bound: float
    pieces: Callable[[Any], Sequence[Tensor]] = itself
    written: Sequence[Tensor] = ()
    also: Callable[[], None] | None = None
    capturable: bool = True
    caveat: str = ""

    def check(self, expected: Expected, replay: tuple[Call, Any] | None = None) -> None:
        """Run once on poisoned outputs and compare; WrongAnswer where an element is off.

        replay: a graph's replay and its static result, in place of `call`.
        """
        for tensor in self.written:
            tensor.fill_(math.nan)
        if replay is None:
            result = self.call()
        else:
            replay[0]()
            result = replay[1]
        left = [piece.reshape(-1) for piece in reversed(self.pieces(result))]
        for values, magnitudes in expected():
            scales = values if magnitudes is None else magnitudes
            for value, scale in zip(values.split(CHUNK), scales.split(CHUNK), strict=True):
                self._compare(_take(left, value.numel()), value, scale)
        if any(piece.numel() for piece in left):
            raise WrongAnswer(f"{self.name}: more elements than expected")
        if self.also is not None:
            self.also()

    def _compare(self, got: Tensor, values: Tensor, scales: Tensor) -> None:
        if got.shape != values.shape:
            raise WrongAnswer(f"{self.name}: fewer elements than expected")
        wide = got.double()
        if self.bound == 0.0 and torch.equal(wide, values):
            return
        finfo = torch.finfo(got.dtype)
        allowed = scales.abs() * self.bound + finfo.smallest_normal * finfo.eps
        # A NaN is not below anything, so it is wrong, too.
        wrong = ((wide - values).abs_() <= allowed).logical_not_()
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise WrongAnswer(
                f"{self.name}: an element is {got[i].item():.9g}, float64 gives "
                f"{values[i].item():.9g} (allowed error {allowed[i].item():.3g}); "
                f"{int(wrong.sum())} of {wrong.numel()} are wrong"
            )


def _take(pieces: list[Tensor], count: int) -> Tensor:
    """The next `count` elements of `pieces`, 1-D tensors in reverse order, taken from its end."""
    taken: list[Tensor] = []
    while pieces and (count or not taken):
        piece = pieces.pop()
        if piece.numel() > count:
            pieces.append(piece[count:])
            piece = piece[:count]
        taken.append(piece)
        count -= piece.numel()
    return taken[0] if len(taken) == 1 else torch.cat(taken)


@dataclass(frozen=True)
class Case:
    """One row. kernel and label name it; rows of one series differ in size alone.

    size: bytes of the payload, the plots' x axis. traffic: bytes by the kernel's `*_bytes`.
    elements, tensors: of the payload. beside: timed along, but no peers.
    """

    kernel: str
    series: str
    label: str
    size: int
    traffic: int
    elements: int
    tensors: int
    ours: Contender
    peers: Sequence[Contender]
    expected: Expected
    beside: Mapping[str, Call] = field(default_factory=dict)


def check_flag(call: Call, flag: Tensor, source: Tensor) -> None:
    """WrongAnswer unless `call` sets `flag` for an Inf at the end of `source`, and only for it."""
    last = source.view(-1)[-1:]
    value = last.clone()
    flag.zero_()
    call()
    before = flag.item()
    last.fill_(math.inf)
    call()
    after = flag.item()
    last.copy_(value)
    flag.zero_()
    if (before, after) != (0.0, 1.0):
        raise WrongAnswer(f"found_inf is {before} without an Inf and {after} with one, not 0 and 1")


def rounded(target: torch.dtype, wide: torch.dtype, terms: int) -> float:
    """Bound for `terms` products summed in `wide` and rounded once to `target`.

    Half an eps for the last rounding, and in `wide` one half each for a scalar, a product and an
    addition of a term, doubled for what is of second order.
    """
    return 0.505 * torch.finfo(target).eps + (3 * terms + 1) * torch.finfo(wide).eps


def wide_of(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute on tensors of `dtypes`."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
