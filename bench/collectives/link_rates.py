"""Measure link rates: what messages and reductions cost on this machine.

`calibrate` runs schedules on the group's transport, all ranks at once as in an all-reduce, for a
fraction of a second; every rank gets rank 0's numbers, so that all of them choose alike.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from collectives.cost import LinkRates, Rate
from collectives.execution.context import CallContext, Workspace
from collectives.execution.executor import execute
from collectives.reducers import Sum, kernels
from collectives.schedules import binomial_tree, ring
from collectives.schedules.partition import split_bounds
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport

# What a message costs; what fits in the caches of a core; what does not.
_SIZES = (64, 512 << 10, 8 << 20)
# A size is measured 3 to 50 times, for about _BUDGET seconds; a call that takes longer than _SLOW
# is measured once and is the last, larger sizes are left out.
_BUDGET, _MIN_RUNS, _MAX_RUNS, _SLOW = 0.04, 3, 50, 0.25
_RING = 4
_TICK = time.get_clock_info("perf_counter").resolution
_NO_COST = Rate(0.0, 0.0)


class Ranks(Protocol):
    """What a group has that is needed to measure it."""

    transport: Transport
    topology: Topology
    timeout: float


def calibrate(group: Ranks, device: torch.device | str = "cpu") -> LinkRates:
    """Measure the group's link rates and `device`'s reductions; the same answer on every rank.

    A collective of all ranks with nothing else under way on the group. Where every node has one
    rank, or where there is one node, the rates within and between nodes are the same.

    Args:
        group: The ranks.
        device: Where the tensors lie that are reduced and sent.

    Raises:
        ValueError: The group's transport does not carry `device`'s tensors.
    """
    device = torch.device(device)
    if str(device) == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    group.transport.check_device(device)
    bench = _Bench(group, device)
    local, rank = group.topology.local_size, group.transport.rank
    intra = bench.message(range(rank - rank % local, rank - rank % local + local))
    inter = bench.message(range(rank % local, group.topology.size, local))
    rates = (
        intra or inter or _NO_COST,
        inter or intra or _NO_COST,
        bench.reduction(lambda mine, theirs: kernels.sum_n([mine, theirs], out=mine)),
        bench.reduction(_adasum),
    )
    intra, inter, plain, adasum = (Rate(*numbers) for numbers in bench.from_rank_0(rates))
    return LinkRates(intra, inter, plain, adasum)


class _Bench:
    """The measurements of one rank; every method is a collective of the group."""

    def __init__(self, group: Ranks, device: torch.device) -> None:
        self._call = CallContext(group.transport, "calibration", group.timeout, Workspace())
        self._device = device

    def from_rank_0(self, numbers: Sequence[Any]) -> list[Any]:
        """Return rank 0's numbers, or rows of numbers."""
        buffer = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        schedule = binomial_tree.broadcast(self._call.transport.size, 0)
        execute(schedule, buffer.view(-1), Sum, self._call)
        return buffer.tolist()

    def message(self, ranks: range) -> Rate | None:
        """Measure a step in which each of `ranks` sends to the next; None for a single rank.

        The steps of small rings, so that a rank's step waits for its neighbour's as in a schedule.
        """
        if len(ranks) == 1:
            return None
        members = _ring(ranks, self._call.transport.rank)
        schedule = ring.all_gather(len(members))

        def prepare(nbytes: int) -> Callable[[], object]:
            buffer = torch.ones(nbytes * len(members), dtype=torch.uint8, device=self._device)
            return lambda: execute(schedule, buffer, Sum, self._call, ranks=members)

        return self._rate(prepare).scaled(1 / (len(members) - 1))

    def reduction(self, reduce: Callable[[torch.Tensor, torch.Tensor], object]) -> Rate:
        """Measure one reduction of a received buffer, while all other ranks reduce as well."""

        def prepare(nbytes: int) -> Callable[[], object]:
            mine, theirs = (torch.ones(nbytes // 4, device=self._device) for _ in range(2))
            return lambda: reduce(mine, theirs)

        return self._rate(prepare)

    def _rate(self, prepare: Callable[[int], Callable[[], object]]) -> Rate:
        """Measure prepare(bytes)'s calls.

        By means: the times of steps add up, and a rank that shares a processor waits for it, or
        is woken late, now and then.
        """
        points: list[tuple[int, float]] = []
        for nbytes in _SIZES:
            call = prepare(nbytes)
            call()
            (once,) = self.from_rank_0([min(self._timed(call) for _ in range(2))])
            times = 1 if once > _SLOW else round(min(max(_BUDGET / once, _MIN_RUNS), _MAX_RUNS))
            points.append((nbytes, statistics.fmean(self._timed(call) for _ in range(times))))
            if once > _SLOW:
                break
        return fit(points)

    def _timed(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # What takes less than a tick takes no time by the clock, which no rate has.
        return max(time.perf_counter() - begin, _TICK)


def fit(points: Sequence[tuple[int, float]]) -> Rate:
    """Return the rate through up to three points (bytes, seconds), sizes ascending.

    No part of it is negative: what falls with the size counts as level.
    """
    (first, seconds), *others = points
    if not others:
        return Rate(seconds, 0.0)
    knee, near = others[0]
    beta = max(0.0, (near - seconds) / (knee - first))
    rate = Rate(max(0.0, seconds - beta * first), beta)
    if len(others) == 1:
        return rate
    last, far = others[1]
    return rate._replace(knee=float(knee), far=max(0.0, (far - near) / (last - knee)))


def _ring(ranks: range, rank: int) -> range:
    """Return the run of two to _RING neighbours that `rank` is in.

    No run is shorter than another by more than one rank.
    """
    bounds = split_bounds(len(ranks), -(-len(ranks) // _RING))
    begin = bisect_right(bounds, ranks.index(rank)) - 1
    return ranks[bounds[begin] : bounds[begin + 1]]


def _adasum(mine: torch.Tensor, theirs: torch.Tensor) -> object:
    whole = (0, mine.numel())
    dots = kernels.dot_and_norms(mine, theirs, whole)
    return kernels.combine(mine, theirs, dots, whole, out=mine)
