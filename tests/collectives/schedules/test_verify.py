"""The verifier finds faults in n-way reductions, phases, replicas, groups and reduces to a root."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from collectives.reducers import Needs
from collectives.schedules.algorithm import ALL
from collectives.schedules.schedule import IDLE, Action, Collective, Schedule, Step, Transfer, Tree
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.user_schedules import verified
from collectives.schedules.verify import Proof, verify

COPY, LEFT, RIGHT = Action.COPY, Action.REDUCE_LEFT, Action.REDUCE_RIGHT


def made(steps: Sequence[Sequence[Step]], chunks: int = 1) -> Schedule:
    """A schedule from steps[rank][number]."""
    return Schedule("made up", len(steps), chunks, Collective.ALL_REDUCE, lambda rank: steps[rank])


def send(*peers: int, chunk: int = 0) -> Step:
    return Step(sends=tuple(Transfer(peer, chunk, chunk + 1) for peer in peers))


def recv(*actions: tuple[int, Action], chunk: int = 0) -> Step:
    return Step(recvs=tuple(Transfer(peer, chunk, chunk + 1, action) for peer, action in actions))


@pytest.mark.parametrize(
    ("recvs", "message"),
    [
        ([(0, LEFT), (2, COPY)], "rank 1 writes chunk 0 twice"),
        ([(0, COPY), (2, LEFT)], "rank 1 writes chunk 0 twice"),
        ([(0, COPY), (2, COPY)], "rank 1 writes chunk 0 twice"),
        ([(0, LEFT)], "rank 2 sends to rank 1, which receives none"),
        ([(0, LEFT), (2, LEFT), (2, RIGHT)], "waits for rank 2"),
    ],
)
def test_faults_of_n_way_reductions_are_found(
    recvs: list[tuple[int, Action]], message: str
) -> None:
    back = [recv((1, COPY)), send(0, 2), recv((1, COPY))]
    steps = [[send(1), back[0]], [recv(*recvs), back[1]], [send(1), back[2]]]
    with pytest.raises(ScheduleError, match=message):
        verify(made(steps))


def direct_exchange(groups: Sequence[tuple[int, ...]]) -> Schedule:
    """Three ranks in one step: each gets both others' vectors and reduces all three in order."""
    steps = []
    for rank in range(3):
        others = [peer for peer in range(3) if peer != rank]
        recvs = tuple(Transfer(p, 0, 1, LEFT if p < rank else RIGHT) for p in others)
        steps.append([Step(tuple(Transfer(p, 0, 1) for p in others), recvs, groups[rank])])
    return made(steps)


def test_n_way_reduction_of_one_rank_carries_adasum() -> None:
    assert verify(direct_exchange([(0,), (1,), (2,)])).carries_adasum
    assert not verify(direct_exchange([(0,), (), (2,)])).carries_adasum


def test_n_way_reduction_of_several_ranks_is_refused() -> None:
    halves = [Transfer(peer, chunk, chunk + 1) for peer in (1, 2) for chunk in (0, 1)]
    steps = [
        [Step(sends=(Transfer(1, 0, 1), Transfer(2, 1, 2))), Step(recvs=(halves[0], halves[3]))],
        [
            Step((Transfer(2, 1, 2),), (Transfer(0, 0, 1, LEFT), Transfer(2, 0, 1, RIGHT)), (1, 2)),
            Step((Transfer(0, 0, 1), Transfer(2, 0, 1)), (Transfer(2, 1, 2),)),
        ],
        [
            Step((Transfer(1, 0, 1),), (Transfer(0, 1, 2, LEFT), Transfer(1, 1, 2, LEFT)), (1, 2)),
            Step((Transfer(0, 1, 2), Transfer(1, 1, 2)), (Transfer(1, 0, 1),)),
        ],
    ]
    with pytest.raises(ScheduleError, match="one pair of whole vectors"):
        verify(made(steps, 2))
    for program in steps[1:]:
        program[0] = program[0]._replace(group=())
    assert verify(made(steps, 2)).tree is not None


def test_groups_of_whole_segments_are_single_ranks() -> None:
    alone, both = (
        dataclasses.replace(made(pair_in_halves(group)), chunks=2, whole_segments=True)
        for group in (None, (0, 1))
    )
    assert verify(alone).carries_adasum
    with pytest.raises(ScheduleError, match="more ranks than hold a segment"):
        verify(both)


def pair_in_halves(group: tuple[int, ...] | None) -> list[list[Step]]:
    """Two ranks reduce half of the buffer each, in rank order, and exchange the answers."""
    steps = []
    for rank in (0, 1):
        mine, other = Transfer(1 - rank, rank, rank + 1), Transfer(1 - rank, 1 - rank, 2 - rank)
        into = mine._replace(action=LEFT if rank else RIGHT)
        steps.append([Step((other,), (into,), group or (rank,)), Step((mine,), (other,))])
    return steps


def two_nodes(*, phase: int = 1, grouped: bool = True, first: int = 0) -> list[list[Step]]:
    """Nodes (0, 1) and (2, 3): each sums its halves in opposite orders, then they pair up."""
    steps: list[list[Step]] = []
    for rank in range(4):
        node, local = divmod(rank, 2)
        mate, twin = 2 * node + 1 - local, (rank + 2) % 4
        group = (2 * node, 2 * node + 1) if grouped else ()
        across = Transfer(twin, local, local + 1, LEFT if node else RIGHT)
        inside = Transfer(mate, local, local + 1, RIGHT)
        steps.append(
            [
                Step((Transfer(mate, 1 - local, 2 - local),), (inside,), phase=first),
                Step((Transfer(twin, local, local + 1),), (across,), group, phase),
                Step((Transfer(mate, local, local + 1),), (Transfer(mate, 1 - local, 2 - local),)),
            ]
        )
    return steps


def test_earlier_phases_may_reduce_in_any_order() -> None:
    assert verify(made(two_nodes(), 2)) == Proof(3, 2, Needs.ONE_TREE)
    ungrouped = verify(made(two_nodes(grouped=False), 2))
    assert ungrouped == Proof(3, 2, Needs.ANY_ORDER)
    flat = verify(made(two_nodes(grouped=False, phase=0), 2))
    assert flat == Proof(3, 1, Needs.ANY_ORDER)
    with pytest.raises(ScheduleError, match="one pair of whole vectors"):
        verify(made(two_nodes(phase=0), 2))


def test_replicas_start_with_their_nodes_contribution() -> None:
    steps = [program[1:] for program in two_nodes()]
    shared = dataclasses.replace(made(steps, 2), replicas=2)
    assert verify(shared) == Proof(2, 2, ALL)
    with pytest.raises(ScheduleError, match=r"misses the contribution of rank|one pair"):
        verify(made(steps, 2))
    with pytest.raises(ScheduleError, match="counted twice"):
        verify(dataclasses.replace(made(two_nodes(), 2), replicas=2))


def test_replicas_divide_the_ranks_of_an_all_reduce() -> None:
    for replicas, rule in ((0, "be at least 1, got 0"), (3, "divide size 4, got 3")):
        with pytest.raises(ValueError, match=f"replicas must {rule}"):
            dataclasses.replace(made(two_nodes(), 2), replicas=replicas)
    with pytest.raises(ValueError, match="not for a reduce"):
        dataclasses.replace(made(two_nodes(), 2), replicas=2, collective=Collective.REDUCE)


def test_reduce_leaves_the_result_on_its_root_only() -> None:
    chain = [[send(1), IDLE], [recv((0, LEFT)), send(2)], [IDLE, recv((1, LEFT))]]
    schedule = dataclasses.replace(made(chain), collective=Collective.REDUCE, root=2)
    assert verify(schedule) == Proof(2, 1, Needs.BALANCED_TREE)
    for root in (0, 1):
        with pytest.raises(ScheduleError, match=f"rank {root} chunk 0 misses"):
            verify(dataclasses.replace(schedule, root=root))
    with pytest.raises(ScheduleError, match="rank 0 chunk 0 misses"):
        verify(made(chain))


def in_pieces(pieces: Sequence[tuple[int, int]]) -> Schedule:
    """Two ranks, all reduced on rank 0 in pieces under a group of its own, and sent back."""
    chunks = max(stop for _, stop in pieces)
    there = Step(sends=tuple(Transfer(0, *piece) for piece in pieces))
    here = Step(recvs=tuple(Transfer(1, *piece, RIGHT) for piece in pieces), group=(0,))
    back = Step(sends=(Transfer(1, 0, chunks),)), Step(recvs=(Transfer(0, 0, chunks),))
    return made([[here, back[0]], [there, back[1]]], chunks)


def test_what_a_rank_with_a_group_reduces_is_one_range() -> None:
    assert verify(in_pieces([(0, 1), (1, 3)])).carries_adasum
    for pieces in ([(1, 3), (0, 1)], [(0, 1), (2, 3), (1, 2)]):
        with pytest.raises(ScheduleError, match="rank 0 has a group but not one range"):
            verify(in_pieces(pieces))


def gathered(steps: list[list[Step]], chunks: int) -> Schedule:
    return dataclasses.replace(made(steps, chunks), gathered=True)


def swapped(chunks: int = 2) -> list[list[Step]]:
    """Two ranks send each other their own vector, of half of the chunks."""
    mine = [Transfer(1 - rank, rank * chunks // 2, (rank + 1) * chunks // 2) for rank in (0, 1)]
    theirs = [mine[1]._replace(peer=1), mine[0]._replace(peer=0)]
    return [[Step((mine[rank],), (theirs[rank],))] for rank in (0, 1)]


def test_gathered_vectors_carry_adasum() -> None:
    for chunks in (2, 6):
        proof = verify(gathered(swapped(chunks), chunks))
        assert proof == Proof(1, 1, ALL)


def changed(rank: int, **fields: Any) -> Schedule:
    """Two nodes, of which a rank's step between them has other fields."""
    steps = two_nodes()
    steps[rank][1] = steps[rank][1]._replace(**fields)
    return made(steps, 2)


WIDE = Transfer(1, 0, 2)
FAULTS: list[tuple[Schedule, str]] = [
    (
        made(
            [
                [Step(sends=(Transfer(1, 0, 1), Transfer(1, 0, 1))), recv((1, COPY))],
                [recv((0, LEFT), (0, RIGHT)), send(0)],
            ]
        ),
        "counted twice",
    ),
    (made(two_nodes(first=1, phase=0, grouped=False), 2), "phase 0 reduces the result of a later"),
    (changed(1, phase=2), "ranks 0 and 1 name different groups"),
    *(
        (changed(0, group=group), "must have its ranks in ascending order")
        for group in ((0, 1, 4), (-1, 0, 1), (1, 0), (0, 0, 1))
    ),
    (changed(0, group=(1, 2)), "rank 0 names a group it is not in"),
    (
        made(
            [
                [Step(sends=(WIDE,)), Step(recvs=(WIDE,))],
                [
                    Step(recvs=(Transfer(0, 0, 2, LEFT), Transfer(2, 0, 1, RIGHT))),
                    Step(sends=(Transfer(0, 0, 2), Transfer(2, 0, 2))),
                ],
                [Step(sends=(Transfer(1, 0, 1),)), Step(recvs=(WIDE,))],
            ],
            2,
        ),
        "rank 1 reduces ranges that overlap",
    ),
    (gathered([[IDLE], [IDLE]], 2), "rank 0 chunk 1 is never written"),
    (
        gathered([[send(1, chunk=1)], [recv((0, COPY), chunk=1)]], 2),
        "sends a chunk it does not have yet",
    ),
    (gathered([[send(1)], [recv((0, LEFT))]], 2), "a chunk it does not have|reduces in a step"),
]


@pytest.mark.parametrize(("schedule", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults_of_steps_are_found(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_gathered_is_for_all_reduces_of_equal_shares() -> None:
    for other in ({"chunks": 3}, {"replicas": 2}, {"whole_segments": True}):
        with pytest.raises(ValueError, match="gathered is for an all_reduce"):
            dataclasses.replace(gathered(swapped(), 2), **other)


JOINS = ((0, 1, 1, 1), (2, 0, 1, 2))
"""2 · (0 · 1)."""


def in_slices(trees: Sequence[Tree], *, turned: int | None = None) -> Schedule:
    """Three ranks, each of which reduces its slice of all vectors by its tree.

    turned: the rank that has its operands in another order.
    """
    steps = []
    for rank, tree in enumerate(trees):
        others = [peer for peer in range(3) if peer != rank]
        sides = {peer: (peer < rank) is not (turned == rank) for peer in others}
        recvs = tuple(
            Transfer(peer, rank, rank + 1, LEFT if sides[peer] else RIGHT) for peer in others
        )
        sends = tuple(Transfer(peer, peer, peer + 1) for peer in others)
        scatter = Step(sends, recvs, (0, 1, 2), tree=tree)
        mine = tuple(Transfer(peer, rank, rank + 1) for peer in others)
        steps.append([scatter, Step(mine, sends)])
    return made(steps, 3)


def test_a_group_of_all_ranks_reduces_by_the_tree_that_its_steps_say() -> None:
    proof = verify(in_slices([JOINS] * 3))
    assert proof.carries_adasum and proof.by_tree and Needs.ALL_OPERANDS in proof.meets
    assert verify(in_slices([((0, 1, 1, 1), (0, 2, 2, 1))] * 3)).carries_adasum
    # Without a tree the group's operands are more than a pair.
    with pytest.raises(ScheduleError, match=r"one pair of whole vectors.* nor does it say"):
        verify(in_slices([()] * 3))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (((0, 1, 1, 1),), "has a tree that leaves out an operand"),
        (((0, 1, 1, 1), (0, 3, 2, 1)), "joins operands 0 and 3 of 3"),
        (((0, 1, 1, 1), (0, -1, 2, 1)), "joins operands 0 and -1 of 3"),
        (((0, 1, 1, 1), (1, 2, 1, 1)), "joins operands 1 and 2 of 3, which .* or has used"),
        (((0, 0, 1, 1), (0, 2, 1, 1)), "joins operands 0 and 0 of 3"),
        (((0, 1, 1, 1), (2, 0, 2, 1)), r"says that \(2, 1\) ranks .* 2 and 0 .*, not \(1, 2\)"),
    ],
)
def test_faults_of_trees_are_found(tree: Tree, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"step 0: rank 0 {message}"):
        verify(in_slices([tree] * 3))


def test_ranks_of_a_group_with_other_trees_or_orders_of_operands_are_found() -> None:
    with pytest.raises(ScheduleError, match="ranks 0 and 2 name different trees"):
        verify(in_slices([JOINS, JOINS, ((0, 1, 1, 1), (0, 2, 2, 1))]))
    # Rank 0's operands as 2, 1, 0: its tables would have rows for other ranks.
    with pytest.raises(ScheduleError, match="does not hold one pair"):
        verify(in_slices([JOINS] * 3, turned=0))


def test_a_tree_of_a_users_schedule_is_read_as_integers() -> None:
    tree = ((True, np.int64(0), 1, 1), (np.int64(1), 2, 2, 1))
    known = verified(in_slices([tree] * 3), 3)  # type: ignore[list-item]
    (step, _) = known.schedule.steps(1)
    assert step.tree == ((1, 0, 1, 1), (1, 2, 2, 1))
    assert {type(each) for join in step.tree for each in join} == {int}
    for wrong in (((0, 1, 1),), ((0, 1, 1, 1.5),), (7,)):
        with pytest.raises(TypeError, match="schedule 'made up', rank 0, step 0"):
            verified(in_slices([wrong] * 3), 3)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="joins operands"):
        verified(in_slices([((0, 5, 1, 1),)] * 3), 3)
