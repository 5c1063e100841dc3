"""What one row compares: the kernel, its rivals, and the answer that each of them must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.timing import Call

Answer = tuple[Tensor, Tensor | None]


class WrongAnswer(AssertionError):
    """A result further from float64 than its bound allows: nothing of it is timed."""


@dataclass(frozen=True)
class Expected:
    """The float64 answer to the pieces [first, last) of a result, end to end.

    make: returns (values, magnitudes), 1-D float64; magnitudes None stands for |values|. An element
    may be off by the contender's bound times its magnitude, and by one subnormal of its dtype.
    """

    first: int
    last: int
    make: Callable[[], Answer]


def itself(result: Any) -> Sequence[Tensor]:
    return [result]


@dataclass(frozen=True)
class Contender:
    """One way to do the job of a row.

    pieces: the parts of what `call` returns that `Expected` counts. bound: see there. written:
    memory that `call` writes, NaN before each check. also: further demands, raising WrongAnswer.
    capturable: whether a CUDA graph may hold it. caveat: why its answer is worth less, if it is.
    """

    name: str
    call: Call
    bound: float
    pieces: Callable[[Any], Sequence[Tensor]] = itself
    written: Sequence[Tensor] = ()
    also: Callable[[], None] | None = None
    capturable: bool = True
    caveat: str = ""

    def check(self, expected: Sequence[Expected], replay: tuple[Call, Any] | None = None) -> None:
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
        pieces = self.pieces(result)
        for part in expected:
            self._compare(pieces[part.first : part.last], *part.make())
        if self.also is not None:
            self.also()

    def _compare(self, pieces: Sequence[Tensor], values: Tensor, magnitudes: Tensor | None) -> None:
        flat = [piece.reshape(-1) for piece in pieces]
        got = flat[0] if len(flat) == 1 else torch.cat(flat)
        if got.shape != values.shape:
            raise WrongAnswer(f"{self.name}: {got.numel()} elements, not {values.numel()}")
        if self.bound == 0.0 and torch.equal(got.double(), values):
            return
        finfo = torch.finfo(got.dtype)
        allowed = (values.abs() if magnitudes is None else magnitudes) * self.bound
        allowed += finfo.smallest_normal * finfo.eps
        error = got.double().sub_(values).abs_()
        # A NaN is not below anything, so it is wrong, too.
        wrong = (error <= allowed).logical_not_()
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise WrongAnswer(
                f"{self.name}: element {i} is {got[i].item():.9g}, float64 gives "
                f"{values[i].item():.9g} (allowed error {allowed[i].item():.3g}); "
                f"{int(wrong.sum())} of {wrong.numel()} are wrong"
            )


@dataclass(frozen=True)
class Case:
    """One row. kernel and label name it; rows of one series differ in size alone.

    size: bytes of the payload, the plots' x axis. traffic: bytes by the kernel's `*_bytes`.
    elements, tensors: of the payload. beside: timed along, but no rivals.
    """

    kernel: str
    series: str
    label: str
    size: int
    traffic: int
    elements: int
    tensors: int
    ours: Contender
    rivals: Sequence[Contender]
    expected: Sequence[Expected]
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
