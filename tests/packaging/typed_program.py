"""A user's program, whose types `test_types` has mypy and pyright check; it runs on one rank, too.

`assert_type` holds what a checker infers. A line that a checker must refuse says so with an ignore
comment, and an ignore comment without an error is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from typing_extensions import assert_type

import adasum as hvd
import kernels
from collectives import Group, Request, Work, default_group


def train(model: torch.nn.Linear) -> hvd.DistributedOptimizer:
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
        op=hvd.Average,
    )
    assert_type(optimizer, hvd.DistributedOptimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.set_backward_passes_per_step(2)
    for _ in range(optimizer.backward_passes_per_step):
        model(torch.randn(8, 4)).square().mean().backward()
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    optimizer.synchronize()
    clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_type(optimizer.process_set, hvd.ProcessSet)
    return optimizer


def communicate(group: Group) -> None:
    ones, rows = torch.ones(3), torch.ones(2, 2)
    assert_type(group.all_reduce(ones), Any)
    assert_type(group.all_reduce(ones, hvd.Adasum, algorithm="rd", async_op=False), Any)
    assert_type(group.all_reduce(ones, dist.ReduceOp.SUM), Any)
    work = group.all_reduce(ones, async_op=True, name="gradient")
    assert_type(work, Any)
    assert_type(work.wait(), Any)
    assert_type(group.grouped_all_reduce([ones, rows]), Any)
    assert_type(group.grouped_all_reduce([ones, rows], async_op=True), Any).wait()
    assert_type(group.reduce(ones, 0, async_op=True), Any).wait()
    assert_type(group.reduce_scatter(ones, prescale=0.5), Any)
    assert_type(group.all_gather(ones, async_op=True), Any).wait()
    assert_type(group.all_to_all(rows), Any)
    assert_type(group.all_to_all(rows, async_op=True).wait(), Any)
    assert_type(group.broadcast(ones, root=0), Any)
    assert_type(group.reduce_to_owners([ones]), Any)
    assert_type(group.broadcast_from_owners([ones], async_op=True).wait(), Any)
    request = group.all_reduce_init(ones)
    assert_type(request, Request[Tensor])
    assert_type(request.start(), Work[Tensor])
    assert_type(request.wait(), Tensor)
    assert_type(group.all_gather_bytes(b"a"), list[bytes])
    assert_type(kernels.sum_n([ones, ones]), Tensor)
    assert_type(hvd.allreduce(ones, op=hvd.Sum), Tensor)
    assert_type(hvd.allreduce(ones, op=dist.ReduceOp.AVG), Tensor)
    assert_type(hvd.synchronize(hvd.allreduce_async(ones)), Tensor)
    assert_type(hvd.grouped_allreduce_async([ones]).wait(), list[Tensor])
    assert_type(hvd.synchronize(group.all_reduce(ones, async_op=True)), Any)
    assert_type(hvd.__version__, str)


def wrong(model: torch.nn.Linear, group: Group) -> list[Callable[[], Any]]:
    """Return mistakes that an editor shows, and that are errors when they are made."""
    sgd = torch.optim.SGD(model.parameters())
    return [
        lambda: hvd.DistributedOptimizer(model),  # type: ignore
        lambda: hvd.DistributedOptimizer(sgd, operator=hvd.Sum),  # type: ignore
        lambda: hvd.DistributedOptimizer(sgd).synchronise(),  # type: ignore
        lambda: hvd.init(time_out=1.0),  # type: ignore
        lambda: hvd.DistributedOptimizer(sgd, method="steps"),  # type: ignore
        lambda: hvd.DistributedOptimizer(sgd, mode="owner"),  # type: ignore
        lambda: hvd.init(None, None, 1.0),  # type: ignore
        lambda: group.all_reduce(torch.ones(1), algorthm="rd"),  # type: ignore
        lambda: hvd.HookState(process_group=3),  # type: ignore
    ]


def main() -> None:
    hvd.init(timeout=60.0)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = train(model)
    assert isinstance(optimizer, hvd.DistributedOptimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    communicate(default_group())


if __name__ == "__main__":
    main()
