"""Reductions inside torch.inference_mode and outside it, of tensors made on either side."""

from __future__ import annotations

import torch

import adasum
from adasum import Adasum, Average, Sum
from collectives import Group, run_threads


def test_reductions_inside_inference_mode_work() -> None:
    """Validation loops average their metrics there; the group then works outside it, too."""

    def run(group: Group) -> list[list[float]]:
        with torch.inference_mode():
            answers = [
                adasum.allreduce(torch.ones(3), op=Sum),
                adasum.allreduce_(torch.ones(3), op=Average),
                adasum.allreduce(torch.ones(3), op=Adasum),
                group.all_reduce(torch.ones(3)),
                group.all_reduce(torch.ones(3), async_op=True).wait(),
                adasum.broadcast(torch.full((3,), float(group.rank)), 1),
                adasum.allgather(torch.ones(1)),
                adasum.reducescatter(torch.ones(2), op=Sum),
            ]
        # With memory that was made in there, and with more.
        answers.append(group.all_reduce(torch.ones(3)))
        answers.append(adasum.allreduce(torch.ones(300_000), op=Sum)[:1])
        return [answer.tolist() for answer in answers]

    wanted = [[2.0] * 3, [1.0] * 3, [1.0] * 3, [2.0] * 3, [2.0] * 3, [1.0] * 3, [1.0] * 2, [2.0]]
    assert run_threads(2, run) == [[*wanted, [2.0] * 3, [2.0]]] * 2
