"""The α-β-γ cost model: the time of a schedule's steps on a machine. Collectives do not use it.

Schedules run in lockstep, and each step ends when its messages have arrived and are reduced. A
rank's sends to one class of peers, in its node or on other nodes, take alpha per peer and beta per
byte; its receives take as long, at the same time. Before every step, including the steps for
Adasum's dot products, the host spends `host` seconds: the model does not assume that it runs ahead
of the device. Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005, for one peer per step; several
peers count one by one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import validation
from collectives.execution.all_reduce import staging_bytes
from collectives.reducers import NODE_RANKS
from collectives.schedules import halving
from collectives.schedules.algorithm import RoundRobin
from collectives.schedules.auto import BETWEEN_TWO_NODES, sum_algorithm, tree_algorithm
from collectives.schedules.levels import across_nodes, schedule_of
from collectives.schedules.registry import algorithm
from collectives.schedules.schedule import Action, Schedule, steps_of
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology

__all__ = ["ASSUMED", "OPS", "Cost", "LinkRates", "Rate", "estimate", "one_launch"]

Floats = NDArray[np.float64]

OPS = ("sum", "adasum")
# Bytes of Adasum's partial products per segment: a dot and two squared norms in float64.
_DOTS_BYTES = 24
# Launches per rank: one checks the precision of its own table, one adds up all tables and computes
# the coefficients.
_COEFFICIENTS_LAUNCHES = 2
# The most ranks of a node whose GPUs reduce by launches.
_LAUNCHED = {"sum": NODE_RANKS, "adasum": 8}
# Columns of each rank's load in a round: for each class and direction the peers and the share of
# the buffer in their messages, then the reductions and the share received for them.
_INTRA, _INTER, _REDUCE, _COLUMNS = 0, 4, 8, 10


class Rate(NamedTuple):
    """The time of messages or reductions.

    Attributes:
        alpha: Seconds for each message or reduction.
        beta: Seconds per byte.
        knee: The largest number of bytes for beta; on a CPU, the size of the caches.
        far: Seconds per byte beyond the knee.
    """

    alpha: float
    beta: float
    knee: float = math.inf
    far: float = 0.0

    def seconds(self, count: Floats | float, nbytes: Floats | float) -> Floats:
        """Return the time of `count` messages or reductions with `nbytes` in all."""
        near = self.alpha * count + self.beta * np.minimum(nbytes, self.knee)
        return near + self.far * np.maximum(nbytes - self.knee, 0.0)


@dataclass(frozen=True)
class LinkRates:
    """A machine's rates for moving bytes between ranks, and for reducing them.

    Attributes:
        intra: Messages to or from peers on the same node.
        inter: Messages to or from peers on other nodes.
        sum: Reductions by a sum, by the bytes received for them.
        adasum: Reductions by Adasum.
        nic: Seconds per byte of the network adapter that all ranks of each node share, each way;
            None if every rank has its own.
        call: Fixed cost of a collective in seconds, on top of its steps.
        host: Seconds that the host spends on each step before the device begins it; 0 on a CPU,
            since it is part of alpha there.
        launch: The same for each launch of `one_launch`, which is no exchange.

    Raises:
        ValueError: A number is negative or not finite.
    """

    intra: Rate
    inter: Rate
    sum: Rate
    adasum: Rate
    nic: float | None = None
    call: float = 0.0
    host: float = 0.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            numbers = (value.alpha, value.beta, value.far) if isinstance(value, Rate) else (value,)
            if any(n is not None and not (n >= 0 and math.isfinite(n)) for n in numbers):
                raise ValueError(f"{name} must be finite seconds and not negative, got {value}")
            if isinstance(value, Rate) and not value.knee > 0:
                raise ValueError(f"{name} must have a knee of more than 0 bytes, got {value}")


ASSUMED = LinkRates(
    intra=Rate(3.4e-6, 1 / 450e9),
    inter=Rate(14e-6, 1 / 50e9),
    sum=Rate(3e-6, 3 / 3.35e12),
    adasum=Rate(7.5e-6, 5.7 / 3.35e12),
    host=60e-6,
    launch=30e-6,
)
"""Assumptions, not measurements: nodes of H100 GPUs, each with its own 400 Gb/s adapter.

alpha: the latencies in NCCL's tuning tables for one hop of a ring over NVLink and over the network
(protocol Simple). beta: the makers' figures, NVLink 4 at 450 GB/s each way and 400 Gb/s. sum: a
kernel launch of 3 µs, and two reads and a write at the 3.35 TB/s of the data sheet. adasum: five
reads or writes in two launches, with 1.14 times a sum's time per byte of traffic: measured on one
GPU, an H200, 1.12 to 1.18 times for pairs of 1 GiB and for 8 slices of 128 MiB (bench/results).
host: the calling thread's processor time for one exchange through NCCL, with stand-ins for CUDA and
NCCL (tests/fakes; a loaded 2-core EPYC), so without the driver and NCCL's own thread.
launch: the same for the start of a request until its launch is on the stream: 22 µs to Triton's
launcher (bench/collectives/host_cost.py; a loaded 2-core Xeon) and 5 in there (bench/NOTES.md).
On an H200's host a start took 25 µs at the least and 68 in the middle, with the driver's part and
the wait for another rank. While the host is ahead of its GPU, as in backward, it costs no time:
with `host` and `launch` of 0 the model gives the GPUs' part.
"""


class Cost(NamedTuple):
    """The cost of one collective.

    Attributes:
        seconds: Its time.
        steps: The number of its schedule's steps.
        intra: Bytes sent inside nodes, by all ranks.
        inter: Bytes sent between nodes, by all ranks.
        busiest_intra: Most bytes that one rank sends or receives inside its node.
        busiest_inter: Most bytes that one node sends to or receives from others.
        memory: Most bytes that any rank has received and not yet reduced.
    """

    seconds: float
    steps: int
    intra: float
    inter: float
    busiest_intra: float
    busiest_inter: float
    memory: float


def estimate(
    spec: str | Schedule,
    nbytes: float,
    rates: LinkRates | None = None,
    topology: Topology | None = None,
    op: str = "sum",
    segments: int = 1,
    device: str | None = None,
) -> Cost:
    """Return the cost of an all-reduce by a specification or a schedule.

    The model walks every rank's steps: 1,024 ranks take seconds, a flat ring of them a minute.

    Args:
        spec: The specification ("rechd/xring#2", "auto", or "rd:16k:rechd": limits count elements
            of 4 bytes), or your own schedule.
        nbytes: Length of each rank's buffer.
        rates: The machine, such as `ASSUMED`; required.
        topology: The nodes of the ranks; required.
        op: "sum" or "adasum"; Average costs the same as Sum.
        segments: The number of tensors in the buffer: Adasum has dot products for each, and a
            parameter-server shuffle places their shards on the ranks.
        device: For `auto`: "cpu" or "cuda".

    Raises:
        TypeError: The rates or the topology are missing.
        ValueError: The specification is unknown, is `auto` without a device, or is a library's
            algorithm with unknown steps; or the schedule is for another number of ranks.
    """
    if rates is None or topology is None:
        raise TypeError("estimate needs rates and a topology: pass ASSUMED, Topology(8, 8)")
    check_op(op)
    if isinstance(spec, Schedule):
        return cost_of(walk(spec, topology, (op,)), nbytes, rates, topology, segments)
    chosen, found = schedule_for(spec, topology, nbytes, device, op, segments)
    rounds = walk(found, topology, (op,) if chosen.inner is None else ("sum", op))
    return cost_of(rounds, nbytes, rates, topology, segments)


def one_launch(
    nbytes: float,
    rates: LinkRates,
    topology: Topology,
    op: str = "sum",
    segments: int = 1,
    *,
    copied: bool = True,
) -> Cost:
    """Return the cost of an all-reduce in memory that each node's GPUs share.

    On one node it is one launch: each rank reads its slice of all vectors and writes the result to
    all ranks, so that each way 2 (n - 1) / n buffers cross its link. Ranks wait for each other
    twice, and once more for Adasum's tables. On several nodes the first launch keeps the slices,
    messages reduce them across the nodes, and a second launch writes them to the node's ranks; a
    launch adds up the parts of dot products that a node's ranks hold.

    Args:
        nbytes: Length of each rank's buffer.
        rates: The machine.
        topology: The nodes.
        op: "sum" or "adasum".
        segments: The number of tensors in the buffer.
        copied: Whether the buffer is copied to the shared memory, and back; a copy has two memory
            accesses, a sum three.
    """
    check_op(op)
    local, nodes = topology.local_size, topology.num_nodes
    received, waits = nbytes * (local - 1) / local, 3 if op == "adasum" else 2
    passes = (2 * local + 1) / (5 * max(1, local - 1)) if op == "adasum" else 1.0
    # A launch costs what a sum's does: by messages Adasum takes two.
    launch = rates.launch + rates.sum.alpha
    rate: Rate = getattr(rates, op)
    seconds = launch + waits * rates.intra.alpha + rate.beta * passes * received
    seconds += 2 * received * rates.intra.beta
    if copied:
        seconds += float(rates.sum.seconds(2, 2 * nbytes * 2 / 3))
    moved = 2 * received * topology.size, 0.0, 2 * received, 0.0, received
    if nodes == 1:
        return Cost(rates.call + seconds, 1, *moved)
    rounds = _slices_across(nbytes / local, topology, op)
    far = {each.step for each in rounds if each.dots and each.load[:, _INTER:_REDUCE].any()}
    near = {each.step for each in rounds if each.dots} - far
    by_messages = [each for each in rounds if not (each.dots and each.step in near)]
    across = cost_of(by_messages, nbytes, rates, topology, segments)
    seconds += launch + 2 * rates.intra.alpha + len(near) * (launch + rates.intra.alpha)
    return Cost(
        across.seconds + seconds,
        across.steps + 2,
        across.intra + moved[0],
        across.inter,
        across.busiest_intra + moved[2],
        across.busiest_inter,
        max(across.memory, received),
    )


def _slices_across(nbytes: float, topology: Topology, op: str) -> tuple[Round, ...]:
    """Return the rounds that reduce the ranks' slices, of `nbytes` each, across nodes."""
    nodes, one_tree = Topology(topology.num_nodes, 1), op == "adasum"
    if nodes.size == 2:
        spec = BETWEEN_TWO_NODES
    elif one_tree:
        spec = tree_algorithm("cuda", int(nbytes), nodes.size)
    else:
        spec = sum_algorithm("cuda", int(nbytes), nodes)
    return walk(
        across_nodes(topology, schedule_of(spec, nodes, one_tree=one_tree)), topology, (op,)
    )


def runs_in_launches(op: str, topology: Topology) -> bool:
    """Return whether GPUs that share memory within their node reduce as in `one_launch`."""
    local, alone = topology.local_size, topology.num_nodes == 1
    # A node's Adasum must be a branch of the balanced tree.
    branches = op == "sum" or alone or not local & (local - 1)
    return 1 < local <= _LAUNCHED[op] and branches


def default_of(op: str, nbytes: float, topology: Topology, device: str) -> str:
    """Return in words how ranks reduce float32 unless asked otherwise, on GPUs over NVLink."""
    check_op(op)
    if device == "cuda" and runs_in_launches(op, topology) and nbytes <= staging_bytes():
        return "one launch" if topology.num_nodes == 1 else "launches with messages in between"
    if device == "cuda" and op == "sum":
        return "NCCL's own sum"
    if device == "cpu" and topology.num_nodes == 1:
        return "the host's shared memory"
    return str(schedule_for("auto", topology, nbytes, device, op)[0])


def check_op(op: str) -> None:
    """Raise ValueError for an operator that the model does not price."""
    if op not in OPS:
        raise ValueError(f"op must be {' or '.join(map(repr, OPS))}, got {op!r}")


def schedule_for(
    text: str,
    topology: Topology,
    nbytes: float | None,
    device: str | None,
    op: str,
    segments: int = 1,
) -> tuple[AllReduceSpec, Schedule]:
    """Return the range of a specification for a buffer, and its schedule; `auto` uses messages.

    `nbytes` may be None for a single range other than `auto`, `device` for ranges other than
    `auto`. Otherwise, and for a library's algorithm, raises ValueError. Limits count elements of 4
    bytes.
    """
    specs = parse_all_reduce_spec(text)
    if nbytes is None and (len(specs) > 1 or specs[0].outer == "auto"):
        raise ValueError(f"specification {text!r} depends on the size: pass nbytes")
    nbytes = 0 if nbytes is None else nbytes
    validation.nbytes(nbytes)
    size = int(nbytes)
    spec, one_tree = replace(spec_for(specs, size // 4), limit=-1), op == "adasum"
    if spec.outer == "auto" and device not in ("cpu", "cuda"):
        raise ValueError(f'for auto, device must be "cpu" or "cuda", got {device!r}')
    if spec.outer == "auto" and one_tree:
        spec = tree_algorithm(str(device), size, topology.size)
    elif spec.outer == "auto":
        spec = sum_algorithm(str(device), size, topology)
    if spec.inner is not None and algorithm(spec.inner).is_library:
        raise ValueError(f"{spec.inner!r} has no schedule, so its steps are unknown")
    # Only shuffles depend on the number of tensors.
    tensors = RoundRobin(min(segments, topology.size) if spec.is_round_robin else 1)
    return spec, schedule_of(spec, topology, one_tree=one_tree, round_robin=tensors)


class Round(NamedTuple):
    """The load of all ranks in one step, or in an exchange of its dot products.

    Attributes:
        step: The number of the step.
        load: [ranks, columns], see `_COLUMNS`.
        reduction: "sum" or "adasum".
        dots: Whether shares are of the partial products, not of the buffer.
        passes: Memory traffic per received byte, relative to a reduction in pairs.
    """

    step: int
    load: Floats
    reduction: str
    dots: bool = False
    passes: float = 1.0


@dataclass
class _Walked:
    """One step of all ranks; `operands` is the largest number in one reduction."""

    load: Floats
    phase: int = 0
    operands: int = 1
    by_tree: bool = False
    groups: list[tuple[int, ...]] = field(default_factory=list)


@lru_cache(maxsize=64)
def walk(
    schedule: Schedule, topology: Topology, reductions: Sequence[str] = ("sum",)
) -> tuple[Round, ...]:
    """Return the rounds of all ranks of `topology`, by walking every rank's steps.

    reductions: "sum" or "adasum" by phase of the steps; the last is for all later phases.
    """
    if schedule.size != topology.size:
        raise ValueError(f"schedule is for {schedule.size} ranks, topology has {topology.size}")
    rounds: list[Round] = []
    for number, step in _steps_of(schedule, topology, reductions).items():
        reduction, passes, load = _of_phase(reductions, step.phase), 1.0, step.load
        if rounds and np.array_equal(load, rounds[-1].load):
            # Rings have thousands of equal steps: keep one table.
            load = rounds[-1].load
        if step.by_tree and reduction == "adasum":
            # A Gram matrix and a blend of n vectors have 2 n + 1 reads and writes of a vector. A
            # reduction in pairs has 5: it reads two vectors twice and writes one.
            passes = (2 * step.operands + 1) / (5 * max(1, step.operands - 1))
        rounds.append(Round(number, load, reduction, passes=passes))
        # Ranks that hold whole segments by themselves exchange no dot products.
        if reduction == "adasum" and not schedule.whole_segments:
            exchange = _tables if step.by_tree else _dots
            rounds += [Round(number, each, "sum", True) for each in exchange(step, topology)]
    others = schedule.size - 1
    if schedule.gathered and others:
        load = np.zeros((schedule.size, _COLUMNS))
        load[:, _REDUCE:] = others if reductions[-1] == "adasum" else 1, others
        rounds.append(Round(rounds[-1].step, load, reductions[-1]))
    return tuple(rounds)


def _of_phase(reductions: Sequence[str], phase: int) -> str:
    return reductions[min(phase, len(reductions) - 1)]


def _steps_of(
    schedule: Schedule, topology: Topology, reductions: Sequence[str]
) -> dict[int, _Walked]:
    found: dict[int, _Walked] = defaultdict(lambda: _Walked(np.zeros((topology.size, _COLUMNS))))
    # Rank after rank, to hold only one rank's steps at a time.
    for rank in range(schedule.size):
        for number, step in enumerate(schedule.steps(rank)):
            its, shares, spans = found[number], Counter[int](), Counter[tuple[int, int]]()
            its.phase, its.by_tree = max(its.phase, step.phase), its.by_tree or bool(step.tree)
            if step.group[:1] == (rank,):
                its.groups.append(step.group)
            for peer, start, stop, action, _ in step.recvs:
                shares[peer] += stop - start
                spans[start, stop] += action is not Action.COPY
            for peer, share in shares.items():
                _add_message(its.load, topology, peer, rank, share / schedule.parts)
            # Adasum of n vectors is n - 1 reductions of pairs, or one by a tree; a sum is one.
            in_pairs = _of_phase(reductions, step.phase) == "adasum" and not step.tree
            for (start, stop), others in spans.items():
                its.operands = max(its.operands, others + 1)
                its.load[rank, _REDUCE] += others if in_pairs else min(others, 1)
                its.load[rank, _REDUCE + 1] += others * (stop - start) / schedule.parts
    return found


def _add_message(load: Floats, topology: Topology, source: int, target: int, share: float) -> None:
    local = topology.local_size
    column = _INTRA if source // local == target // local else _INTER
    load[source, column : column + 2] += 1, share
    load[target, column + 2 : column + 4] += 1, share


def _dots(step: _Walked, topology: Topology) -> Iterable[Floats]:
    """Return the loads to sum partial products in all groups at once, by recursive doubling."""
    loads: dict[int, Floats] = defaultdict(lambda: np.zeros((topology.size, _COLUMNS)))
    for group in step.groups:
        doubling = halving.doubling(len(group))
        for place, rank in enumerate(group):
            for number, each in enumerate(steps_of(doubling, place)):
                for recv in each.recvs:
                    _add_message(loads[number], topology, group[recv.peer], rank, 1.0)
                    loads[number][rank, _REDUCE:] += recv.action is not Action.COPY
    return loads.values()


def _tables(step: _Walked, topology: Topology) -> Iterable[Floats]:
    """Return the load to gather Gram matrices in groups and compute coefficients from them."""
    load: Floats = np.zeros((topology.size, _COLUMNS))
    # Two float64 numbers per entry.
    share = step.operands**2 * 16 / _DOTS_BYTES
    for group in (group for group in step.groups if len(group) > 1):
        for rank in group:
            for peer in group:
                if peer != rank:
                    _add_message(load, topology, peer, rank, share)
            load[rank, _REDUCE:] += _COEFFICIENTS_LAUNCHES, (len(group) - 1) * share
    return [load] if load.any() else []


def cost_of(
    rounds: Sequence[Round],
    nbytes: float,
    rates: LinkRates,
    topology: Topology,
    segments: int = 1,
) -> Cost:
    """Return the cost of rounds, with dot products for each of `segments` tensors."""
    seconds, memory, moved = rates.call, 0.0, np.zeros((topology.size, 4))
    for each in rounds:
        # Idle steps cost nothing.
        seconds += rates.host if each.load.any() else 0.0
        moving, reducing = times_of(each, nbytes, rates, topology, segments)
        seconds += float((moving + reducing).max())
        size = _DOTS_BYTES * segments if each.dots else nbytes
        moved += size * each.load[:, [1, 3, 5, 7]]
        if not each.dots:
            memory = max(memory, float(each.load[:, _REDUCE + 1].max()) * nbytes)
    steps = rounds[-1].step + 1 if rounds else 0
    nodes = moved[:, 2:].reshape(topology.num_nodes, -1, 2).sum(1)
    intra, _, inter, _ = moved.sum(0).tolist()
    return Cost(seconds, steps, intra, inter, float(moved[:, :2].max()), float(nodes.max()), memory)


def times_of(
    each: Round, nbytes: float, rates: LinkRates, topology: Topology, segments: int = 1
) -> tuple[Floats, Floats]:
    """Return the seconds of each rank's messages in a round, and of its reductions after them."""
    size, load = _DOTS_BYTES * segments if each.dots else nbytes, each.load
    intra, inter = (
        np.maximum(*(rate.seconds(load[:, i], size * load[:, i + 1]) for i in (start, start + 2)))
        for start, rate in ((_INTRA, rates.intra), (_INTER, rates.inter))
    )
    if rates.nic is not None:
        shared = load[:, [_INTER + 1, _INTER + 3]].reshape(topology.num_nodes, -1, 2).sum(1).max(1)
        queued = rates.inter.alpha + rates.nic * size * shared.repeat(topology.local_size)
        inter = np.where(inter > 0, np.maximum(inter, queued), 0.0)
    rate: Rate = getattr(rates, each.reduction)
    read = each.passes * size * load[:, _REDUCE + 1]
    return np.maximum(intra, inter), rate.seconds(load[:, _REDUCE], read)
