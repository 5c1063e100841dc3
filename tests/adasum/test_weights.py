"""Adasum weighs its operands by the ranks behind them, also in users' schedules.

By every algorithm it does in tests/accuracy and in the frozen answers; of joined ranks see
horovod/test_join.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import adasum as hvd
from adasum import Adasum
from collectives import Group, run_threads
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.schedules import halving
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.schedules.verify import with_leaves
from tests.adasum.definition import line, relative_error, tolerance

# No multiple of a number of ranks, so that pieces cut segments.
BOUNDS = (0, 101, 150, 303)


def inputs(size: int) -> list[Tensor]:
    """Vectors with a part in common: coefficients matter, and no sum cancels."""
    generator = torch.Generator().manual_seed(size)
    draw = torch.randn(size + 1, BOUNDS[-1], generator=generator, dtype=torch.float64)
    return list(draw[0] + draw[1:])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("method", ["gradient", "delta"])
def test_optimizer_steps_by_weighted_and_by_unweighted_adasum(method: str, weighted: bool) -> None:
    """SGD of rate 1 takes the gradients' Adasum either way; "xring" on four ranks is a line."""
    vectors = inputs(4)

    def work(group: Group) -> Tensor:
        parameter = torch.nn.Parameter(torch.zeros_like(vectors[0]))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            op=Adasum,
            algorithm="xring",
            weighted=weighted,
            method=method,
        )
        (parameter * vectors[group.rank]).sum().backward()
        optimizer.step()
        return -parameter.detach()

    want = line(vectors, weighted=weighted)
    for answer in run_threads(4, work):
        assert relative_error(answer, want) <= tolerance(torch.float64)


def test_a_schedule_of_ones_own_is_weighed_by_what_verify_derives() -> None:
    """A chain with rank 1 first: it reads as ((1 0) 2), whose weights no step says."""

    def steps(rank: int) -> list[Step]:
        out, into = Step(sends=(Transfer(0, 0, 1),)), Action.REDUCE_LEFT
        return [
            [Step(recvs=(Transfer(1, 0, 1, into),), group=(0,)), Step((Transfer(2, 0, 1),)),
             Step(recvs=(Transfer(2, 0, 1),))],
            [out, Step(), Step(recvs=(Transfer(2, 0, 1),))],
            [Step(), Step(recvs=(Transfer(0, 0, 1, into),), group=(2,)),
             Step((Transfer(0, 0, 1), Transfer(1, 0, 1)))],
        ][rank]  # fmt: skip

    schedule = Schedule("chain", 3, 1, Collective.ALL_REDUCE, steps)
    vectors = inputs(3)

    counted = with_leaves(schedule)

    def run(group: Group) -> Tensor:
        call = CallContext(group.transport, "a chain", 30.0, Workspace())
        mine = vectors[group.rank].clone()
        execute(counted, mine, Adasum, call)
        return mine

    want = line([vectors[1], vectors[0], vectors[2]])
    for answer in run_threads(3, run):
        assert relative_error(answer, want) <= tolerance(torch.float64)


def test_a_schedule_that_does_not_say_its_weights_is_refused() -> None:
    said = halving.doubling(2)

    def steps(rank: int) -> Iterator[Step]:
        for step in said.steps(rank):
            yield step._replace(recvs=tuple(recv._replace(leaves=None) for recv in step.recvs))

    schedule = replace(said, steps=steps)

    def run(group: Group) -> None:
        call = CallContext(group.transport, "a call", 30.0, Workspace())
        execute(schedule, torch.ones(4), Adasum, call)

    with pytest.raises(ValueError, match=r"step 0 \(rd\) of a call does not state how many ranks"):
        run_threads(2, run)
