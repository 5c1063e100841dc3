"""What people type first, from memory of another library: it works, or the error names the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import adasum as hvd
import collectives
import kernels
from collectives import Group, cost
from tests.adasum.jobs import on_ranks

Mistake = Callable[[Group, Any, Any], Any]


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def two() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "model": (lambda g, m, o: hvd.broadcast_parameters(m, 0), r"state_dict\(\)"),
    "optimizer": (lambda g, m, o: hvd.broadcast_parameters(o, 0), "broadcast_optimizer_state"),
    "fp16": (lambda g, m, o: train(o, m, compression="fp16"), "Compression.fp16"),
    "fp8": (lambda g, m, o: hvd.Compression.fp8, "bf16"),
    "ring": (lambda g, m, o: train(o, m, algorithm="ring"), "did you mean xring?"),
    "tree": (lambda g, m, o: train(o, m, order="tree", algorithm="xring"), "use rechd"),
    "sum_n": (lambda g, m, o: kernels.sum_n(*two()), r"one list: sum_n\(\[a, b\]\)"),
    "adasum": (lambda g, m, o: kernels.adasum(two()), "two tensors.*gram"),
    "cat": (lambda g, m, o: kernels.unpack(torch.cat(two()), two()), "pack makes it"),
    "get_kernel": (lambda g, m, o: kernels.get_kernel, "Hugging Face"),
    "allreduce": (lambda g, m, o: collectives.allreduce, "did you mean all_reduce?"),
    "collectives.all_reduce": (lambda g, m, o: collectives.all_reduce, r"Group.*group\.all_reduce"),
    "Reducers": (lambda g, m, o: collectives.Reducers, "did you mean Reducer?"),
    "AdaSum": (lambda g, m, o: hvd.AdaSum, r"'AdaSum': did you mean Adasum\?"),
    "adasum_": (lambda g, m, o: hvd.adasum_, r"did you mean Adasum\?"),
    "average": (lambda g, m, o: hvd.average, r"did you mean Average\?"),
    "all_reduce": (lambda g, m, o: hvd.all_reduce, r"did you mean allreduce\?"),
    "Allreduce": (lambda g, m, o: hvd.Allreduce, r"did you mean allreduce\?"),
    "Optimiser": (lambda g, m, o: hvd.DistributedOptimiser, r"mean DistributedOptimizer\?"),
    "localrank": (lambda g, m, o: hvd.localrank, r"did you mean local_rank\?"),
    "packs": (lambda g, m, o: kernels.packs, "did you mean pack?"),
    "reduce_scatter": (lambda g, m, o: g.reduce_scatter(*two()), "out="),
    "all_gather": (lambda g, m, o: g.all_gather([torch.ones(2)], torch.ones(2)), "out="),
    "estimate": (lambda g, m, o: cost.estimate("rechd", 1e6), "ASSUMED"),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks(2)
def test_mistake_is_an_error_that_names_the_fix(group: Group, name: str) -> None:
    mistake, fix = MISTAKES[name]
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((AttributeError, ImportError, TypeError, ValueError), match=fix):
        mistake(group, model, optimizer)


def test_op_of_torch_is_taken_for_ours() -> None:
    def run(group: Group) -> list[float]:
        value = hvd.allreduce(torch.ones(2), op=dist.ReduceOp.SUM)
        return [*value.tolist(), *group.all_reduce(torch.ones(2), op=dist.ReduceOp.SUM).tolist()]

    assert collectives.run_threads(2, run) == [[2.0] * 4] * 2


@pytest.mark.parametrize("module", [kernels, collectives, hvd])
def test_private_name_raises_without_a_guess(module: Any) -> None:
    with pytest.raises(AttributeError, match=r"has no attribute '_sums'$"):
        _ = module._sums
