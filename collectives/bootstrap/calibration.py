"""Measure link rates: what messages and reductions cost on this machine.

`calibrate` runs schedules on the group's transport, all ranks at once as in an all-reduce, for a
fraction of a second; every rank gets rank 0's numbers, so that all of them choose alike.
"""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from collectives.cost import LinkRates, Rate
from collectives.execution.executor import Workspace, execute
from collectives.reducers import Sum, kernels
from collectives.schedules import binomial_tree, recursive_doubling, ring
from collectives.schedules.partition import split_bounds
from collectives.schedules.schedule import Schedule
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.transport.byte_gathering import gather_bytes

__all__ = ["Ranks", "calibrate", "fit"]

_LABEL = "calibration"
_SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)
# A size is measured 3 to 50 times, for about _BUDGET seconds; a call that takes longer than _SLOW
# is measured once and is the last, larger sizes are left out.
_BUDGET, _MIN_RUNS, _MAX_RUNS, _SLOW = 0.02, 3, 50, 0.25
_RING = 4
_TICK = time.get_clock_info("perf_counter").resolution

_Key = tuple[str, str, int, tuple[bytes, ...]]
_known: dict[_Key, LinkRates] = {}


class Ranks(Protocol):
    """What a group has that is needed to measure it."""

    transport: Transport
    topology: Topology
    timeout: float


def calibrate(
    group: Ranks, device: torch.device | str = "cpu", *, renew: bool = False
) -> LinkRates:
    """Measure the group's link rates and `device`'s reductions; the same answer on every rank.

    A collective of all ranks with nothing else under way on the group. Where every node has one
    rank, or where there is one node, the rates within and between nodes are the same. The answer is
    kept for the process, by the transport's kind, the device's, the ranks a node and the host of
    every rank.

    Args:
        group: The ranks.
        device: Where the tensors lie that are reduced and sent.
        renew: Whether to measure also where the answer is known.

    Raises:
        ValueError: The group's transport does not carry `device`'s tensors.
    """
    device = torch.device(device)
    if str(device) == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    group.transport.check_device(device)
    bench = _Bench(group, device)
    kind, local_size = type(group.transport).__name__, group.topology.local_size
    key = (kind, device.type, local_size, tuple(bench.hosts()))
    # A rank that was in another group on these hosts may know what others do not, or know another
    # answer.
    known = None if renew else _known.get(key)
    everyone_knows = bench.sum(int(known is not None)) == group.transport.size
    rates = bench.from_rank_0(known) if known is not None and everyone_knows else bench.rates()
    _known[key] = rates
    return rates


class _Bench:
    """The measurements of one rank; every method is a collective of the group."""

    def __init__(self, group: Ranks, device: torch.device) -> None:
        self._transport = group.transport
        self._topology = group.topology
        self._timeout = group.timeout
        self._device = device
        self._workspace = Workspace()

    def hosts(self) -> list[bytes]:
        """The name of every rank's host."""
        name = os.uname().nodename.encode()
        if self._transport.size == 1:
            return [name]
        return gather_bytes(name, self._transport, _LABEL, self._timeout)

    def sum(self, value: int) -> int:
        """Of all ranks' values."""
        return int(self._control(recursive_doubling.all_reduce(self._transport.size), [value])[0])

    def told(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values."""
        return self._control(binomial_tree.broadcast(self._transport.size, 0), values)

    def rates(self) -> LinkRates:
        """Everything, as rank 0 measured it."""
        local, rank = self._topology.local_size, self._transport.rank
        first, place = rank - rank % local, rank % local
        intra = self._message(range(first, first + local))
        inter = self._message(range(place, self._topology.size, local))
        found = (
            intra or inter or Rate(0.0, 0.0),
            inter or intra or Rate(0.0, 0.0),
            self._reduction(_sum),
            self._reduction(_adasum),
        )
        return self.from_rank_0(LinkRates(*found))

    def from_rank_0(self, rates: LinkRates) -> LinkRates:
        """What rank 0 takes them to be."""
        found = (rates.intra, rates.inter, rates.sum, rates.adasum)
        told = self.told([part for rate in found for part in rate])
        width = len(Rate._fields)
        intra, inter, plain, adasum = (
            Rate(*told[i : i + width]) for i in range(0, len(told), width)
        )
        return LinkRates(intra, inter, plain, adasum)

    def _control(self, schedule: Schedule, values: Sequence[float]) -> list[float]:
        buffer = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._execute(schedule, buffer)
        return buffer.tolist()

    def _execute(
        self, schedule: Schedule, buffer: torch.Tensor, ranks: Sequence[int] | None = None
    ) -> None:
        execute(
            schedule,
            buffer,
            self._transport,
            Sum,
            label=_LABEL,
            timeout=self._timeout,
            workspace=self._workspace,
            ranks=ranks,
        )

    def _message(self, ranks: range) -> Rate | None:
        """A step in which each of `ranks` sends to the next; None for a single rank.

        The steps of small rings, so that a rank's step waits for its neighbour's as in a schedule.
        """
        if len(ranks) == 1:
            return None
        members = _ring(ranks, self._transport.rank)
        schedule = ring.all_gather(len(members))

        def prepare(nbytes: int) -> Callable[[], None]:
            buffer = torch.ones(nbytes * len(members), dtype=torch.uint8, device=self._device)
            return lambda: self._execute(schedule, buffer, members)

        return self._rate(prepare).scaled(1 / (len(members) - 1))

    def _reduction(self, reduce: Callable[[torch.Tensor, torch.Tensor], object]) -> Rate:
        """One reduction of a received buffer, while all other ranks reduce as well."""

        def prepare(nbytes: int) -> Callable[[], object]:
            mine, theirs = (torch.ones(nbytes // 4, device=self._device) for _ in range(2))
            return lambda: reduce(mine, theirs)

        return self._rate(prepare)

    def _rate(self, prepare: Callable[[int], Callable[[], object]]) -> Rate:
        """The rate of prepare(bytes)'s calls.

        From means: the times of steps add up, and a rank that shares a processor waits for it, or
        is woken late, now and then.
        """
        points: list[tuple[int, float]] = []
        for nbytes in _SIZES:
            call = prepare(nbytes)
            call()
            (once,) = self.told([min(self._timed(call) for _ in range(2))])
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
    """The rate of (bytes, seconds), sizes ascending; none of its parts is negative.

    A line through all but the last, nearest in relative error; the last, which is larger than a
    core's caches, says how it goes on.
    """
    near = _line(points[:-1] or points)
    (knee, _), (nbytes, seconds) = points[-2:] if len(points) > 1 else (points[0], points[0])
    if nbytes == knee:
        return near
    far = (seconds - near.alpha - near.beta * knee) / (nbytes - knee)
    return near._replace(knee=float(knee), far=max(0.0, far))


def _line(points: Sequence[tuple[int, float]]) -> Rate:
    weights = [(1 / t, n / t) for n, t in points]
    aa = sum(a * a for a, _ in weights)
    ab = sum(a * b for a, b in weights)
    bb = sum(b * b for _, b in weights)
    a, b = sum(a for a, _ in weights), sum(b for _, b in weights)
    determinant = aa * bb - ab * ab
    if len(points) > 1 and determinant > 0:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return Rate(alpha, beta)
        if beta >= 0:
            return Rate(0.0, b / bb)
    return Rate(a / aa, 0.0)


def _ring(ranks: range, rank: int) -> range:
    """Return the run of two to _RING neighbours that `rank` is in.

    No run is shorter than another by more than one rank.
    """
    bounds = split_bounds(len(ranks), -(-len(ranks) // _RING))
    begin = bisect_right(bounds, ranks.index(rank)) - 1
    return ranks[bounds[begin] : bounds[begin + 1]]


def _sum(mine: torch.Tensor, theirs: torch.Tensor) -> object:
    return kernels.sum_n([mine, theirs], out=mine)


def _adasum(mine: torch.Tensor, theirs: torch.Tensor) -> object:
    whole = (0, mine.numel())
    dots = kernels.dot_and_norms(mine, theirs, whole)
    return kernels.combine(mine, theirs, dots, whole, out=mine)
