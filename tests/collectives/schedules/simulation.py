"""Schedules run on nested tuples, and what they cost; apart from the prover, to check it by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from collectives.schedules.levels import schedule_of
from collectives.schedules.schedule import Action, Schedule, Step
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology


def one_level(name: str, shards: int, topology: Topology, *, one_tree: bool = False) -> Schedule:
    """The all-reduce of all ranks by `name#shards`."""
    return schedule_of(AllReduceSpec(name, shards, -1), topology, one_tree=one_tree)


def two_levels(
    inner: str,
    inner_shards: int,
    outer: str,
    outer_shards: int,
    topology: Topology,
    *,
    one_tree: bool = False,
) -> Schedule:
    """The all-reduce by `inner#inner_shards/outer#outer_shards`."""
    spec = AllReduceSpec(f"{inner}/{outer}", outer_shards, -1, inner_shards)
    return schedule_of(spec, topology, one_tree=one_tree)


Tree = Any  # a rank, or a pair of trees


def answers(schedule: Schedule) -> list[list[Tree]]:
    """What every rank ends with in every chunk of an all-reduce or a reduce: the tree of ranks."""
    state: list[list[Tree]] = [
        [rank // schedule.replicas] * schedule.chunks for rank in range(schedule.size)
    ]
    if schedule.gathered:
        # None stands for what a rank does not have.
        owners = [chunk // schedule.parts for chunk in range(schedule.chunks)]
        state = [[o if o == rank else None for o in owners] for rank in range(schedule.size)]
    for steps in zip(*(schedule.steps(rank) for rank in range(schedule.size)), strict=True):
        sent: dict[tuple[int, int], list[list[Tree]]] = {}
        for rank, step in enumerate(steps):
            for peer, start, stop, *_ in step.sends:
                sent.setdefault((rank, peer), []).append(state[rank][start:stop])
        for rank, step in enumerate(steps):
            arrived = [sent[recv.peer, rank].pop(0) for recv in step.recvs]
            for chunk in range(schedule.chunks):
                state[rank][chunk] = _received(step, arrived, chunk, state[rank][chunk])
    if schedule.gathered:
        return [[folded(row[:: schedule.parts])] * schedule.chunks for row in state]
    return state


def _received(step: Step, arrived: list[list[Tree]], chunk: int, mine: Tree) -> Tree:
    before: list[Tree] = []
    after: list[Tree] = []
    for recv, values in zip(step.recvs, arrived, strict=True):
        if recv.start <= chunk < recv.stop:
            value = values[chunk - recv.start]
            if recv.action is Action.COPY:
                return value
            (after if recv.action is Action.REDUCE_RIGHT else before).append(value)
    operands = [*before, mine, *after]
    if not step.tree or len(operands) == 1:
        return folded(operands)
    for left, right, *_ in step.tree:
        operands[left] = operands[left], operands[right]
    return operands[step.tree[-1][0]]


def with_step(schedule: Schedule, rank: int, number: int, step: Step) -> Schedule:
    """The schedule with one step of one rank replaced."""

    def steps(r: int) -> list[Step]:
        result = list(schedule.steps(r))
        if r == rank:
            result[number] = step
        return result

    return replace(schedule, steps=steps)


def silent(schedule: Schedule) -> Schedule:
    """The schedule, of which no receive says what stands behind it: as a user writes one."""

    def steps(rank: int) -> Iterator[Step]:
        for step in schedule.steps(rank):
            yield step._replace(recvs=tuple(recv._replace(leaves=None) for recv in step.recvs))

    return replace(schedule, steps=steps)


def folded(trees: list[Tree]) -> Tree:
    """((0, 1), 2), ...: left to right."""
    tree = trees[0]
    for other in trees[1:]:
        tree = (tree, other)
    return tree


def balanced(trees: list[Tree]) -> Tree:
    """Neighbours pair, then neighbouring pairs, and so on; a power of two of them."""
    while len(trees) > 1:
        trees = list(zip(trees[::2], trees[1::2], strict=True))
    return trees[0]


def ranks_in(tree: Tree) -> frozenset[int]:
    """The ranks at the leaves of a tree."""
    if isinstance(tree, tuple):
        return frozenset().union(*map(ranks_in, tree))
    return frozenset([tree])
