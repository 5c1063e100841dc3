"""What one row compares: the kernel, its peers, and the answer that each must give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.kernels.timing import DEVICE, Call

# The next elements of an answer: values and magnitudes, 1-D float64; None stands for |values|.
Answer = tuple[Tensor, Tensor | None]
Expected = Callable[[], Iterable[Answer]]
# Elements compared at once. On a CPU few enough that the allocator reuses memory: fresh pages cost
# more than the comparison.
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}[DEVICE]
# Timed beside a planned run.
DIRECT = "direct call"


class WrongAnswer(AssertionError):
    """A result is further from float64 than its bound allows; it is not timed."""


@dataclass(frozen=True)
class Contender:
    """One way to do the job of a row.

    An element may be off by `bound` times its magnitude, plus one subnormal of its dtype. `pieces`
    gets the tensors of the answer from what `call`, the function that is timed, returns. `written`,
    the memory that it writes, is filled with NaN before each check. flag: found_inf, and a tensor
    in which an Inf must set it; also: checks more, and raises WrongAnswer; capturable: whether a
    CUDA graph may capture it; caveat: why its answer is worth less, if it is.
    """

    name: str
    call: Call
    bound: float
    pieces: Callable[[Any], Sequence[Tensor]] = lambda result: [result]
    written: Sequence[Tensor] = ()
    flag: tuple[Tensor, Tensor] | None = None
    also: Callable[[], None] | None = None
    capturable: bool = True
    caveat: str = ""

    def check(self, expected: Expected, replay: tuple[Call, Any] | None = None) -> None:
        """Run once on outputs of NaN and compare; WrongAnswer if an element is off.

        replay: a graph's replay and its static result, used in place of `call`.
        """
        for tensor in self.written:
            tensor.fill_(math.nan)
        result = (self.call if replay is None else replay[0])()
        if replay is not None:
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
        if self.flag is not None:
            self._check_flag(*self.flag)

    def _check_flag(self, flag: Tensor, source: Tensor) -> None:
        """Raise WrongAnswer unless `call` sets `flag` for an Inf in `source`, and only then."""
        last = source.view(-1)[-1:]
        value, found = last.clone(), []
        for put in (value, torch.full_like(value, math.inf)):
            last.copy_(put)
            flag.zero_()
            self.call()
            found.append(flag.item())
        last.copy_(value)
        flag.zero_()
        if found != [0.0, 1.0]:
            raise WrongAnswer("found_inf is {} without an Inf and {} with one".format(*found))

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
    """Take the next `count` elements from the end of `pieces`, 1-D tensors in reverse order."""
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
class Spec:
    """What one row is about. Kernel and label are its name.

    series: rows of one series differ in size alone; checked: whether found_inf is asked for;
    planned: whether a plan is timed, with the direct call beside it; wall: whether it is timed on
    CUDA until the device is done, the host's time included, and never replayed; sets: lists of
    tensors that take turns.
    """

    kernel: str
    series: str
    label: str
    _: KW_ONLY
    checked: bool = False
    planned: bool = False
    wall: bool = False
    sets: int = 1

    def __str__(self) -> str:
        return f"{self.kernel} {self.label}"


@dataclass(frozen=True)
class Case:
    """One row.

    size: bytes of the payload, the x axis of the plots; traffic: the least bytes moved, by the
    kernel's `*_bytes`; elements, tensors: of the payload; beside: calls that are timed in the same
    rounds and are no peers; reads: whether it hardly writes, on CUDA a sum is its roof then, and no
    copy; plan: makes a plan and returns its run, None where a row has none; compiled: makes
    torch.compile's contenders.
    """

    spec: Spec
    size: int
    traffic: int
    elements: int
    tensors: int
    ours: Contender
    peers: Sequence[Contender]
    expected: Expected
    beside: Mapping[str, Call] = field(default_factory=dict)
    reads: bool = False
    plan: Callable[[], Call] | None = None
    compiled: Callable[[], list[Contender]] = list


def completed(cases: Iterator[Case], compiled: bool) -> Case:
    """Return a row's case, with its plan in place of the direct call where the spec says so.

    cases: yields it with direct calls, and others, on copies, of which `spec.sets` take turns;
    compiled: whether torch.compile is a peer, which takes minutes on a CPU.
    """
    case = next(cases)
    ours, peers, beside = case.ours, case.peers, dict(case.beside)
    if case.spec.planned and case.plan is not None:
        beside[DIRECT] = ours.call
        ours = replace(ours, call=case.plan())
    if case.spec.sets > 1:
        turns = [case, *itertools.islice(cases, case.spec.sets - 1)]
        ours = _rotating([each.ours for each in turns])
        peers = [*map(_rotating, zip(*(each.peers for each in turns), strict=True))]
    elif compiled:
        peers = [*peers, *case.compiled()]
    return replace(case, ours=ours, peers=peers, beside=beside)


def _rotating(contenders: Sequence[Contender]) -> Contender:
    """Return one that takes the next of equal ones, of other tensors, at each call; no graph."""
    turns = itertools.cycle(contenders)
    current = contenders[0]

    def call() -> Any:
        nonlocal current
        current = next(turns)
        return current.call()

    return replace(
        contenders[0],
        call=call,
        pieces=lambda result: current.pieces(result),
        written=[tensor for each in contenders for tensor in each.written],
        capturable=False,
    )
