"""What ranks do under DistributedDataParallel: every op and wrapper, against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from tests.adasum import ddp_cases, ddp_complex
from tests.adasum.ddp_model import (
    HUGE,
    OPS,
    STEPS,
    TINY,
    Net,
    columns_of,
    compare,
    defined,
    gradients,
    loss_of,
    run_checks,
    wrap,
)
from tests.adasum.definition import relative_error, tolerance
from tests.collectives.test_tree_order import reference, same_bits


def check_options(rank: int) -> None:
    """Every op with every layout of buckets, before and after DDP rebuilds them."""
    model = Net()
    columns = [columns_of(model, step) for step in range(STEPS)]
    layouts: list[dict[str, Any]] = [
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": HUGE},
        {"bucket_cap_mb": 0.05, "static_graph": True},
        {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ]
    for op in OPS:
        for layout in layouts:
            wrapped = wrap(model, op, **layout)
            for step in range(STEPS):
                wrapped.zero_grad()
                loss_of(wrapped, rank, step).backward()
                compare(gradients(wrapped), op, columns[step], torch.float32)


def check_tree_order(rank: int) -> None:
    """With order="tree" gradients are the balanced tree over the ranks, in buckets of any size."""
    model = Net()
    columns = columns_of(model, 0)
    for op in (hvd.Sum, hvd.Average):
        for cap in (TINY, 0.05, HUGE):
            wrapped = wrap(model, HookState(op, order="tree"), bucket_cap_mb=cap)
            loss_of(wrapped, rank, 0).backward()
            for got, column in zip(gradients(wrapped), columns, strict=True):
                if got is not None:
                    assert same_bits(got, reference(column, op, None)), op


def check_unused(rank: int) -> None:
    """A parameter unused on some ranks counts as zeros there; unused on all, it has no gradient."""
    model = Net()
    model.never = nn.Linear(2, 2)
    used = [p for n, p in enumerate(model.parameters()) if n < len(list(model.parameters())) - 2]

    def backward(replica: nn.Module, r: int) -> None:
        loss_of(replica, r, 0, side=r != 0).backward()

    columns = columns_of(model, 0, backward)[: len(used)]
    for op in OPS:
        wrapped = wrap(model, op, find_unused_parameters=True, bucket_cap_mb=0.05)
        for _ in range(2):
            wrapped.zero_grad()
            backward(wrapped, rank)
            got = gradients(wrapped)
            compare(got[: len(used)], op, columns, torch.float32)
            assert got[len(used) :] == [None, None]


def check_no_sync(rank: int) -> None:
    """What no_sync accumulates is reduced by the first backward outside of it."""
    model = Net()

    def backward(replica: nn.Module, r: int) -> None:
        for step in range(STEPS):
            last = step == STEPS - 1
            with replica.no_sync() if hasattr(replica, "no_sync") and not last else nullcontext():
                loss_of(replica, r, step).backward()

    columns = columns_of(model, 0, backward)
    for op in OPS:
        for view in (False, True):
            wrapped = wrap(model, op, gradient_as_bucket_view=view)
            backward(wrapped, rank)
            compare(gradients(wrapped), op, columns, torch.float32)


def check_join(rank: int) -> None:
    """Rank r has 1 + r batches: those that have joined contribute zeros, and Average divides by
    all ranks."""
    model, size = Net(), dist.get_world_size()
    rows = [columns_of(model, step) for step in range(size)]
    for op in OPS:
        wrapped = wrap(model, op, bucket_cap_mb=0.05)
        with Join([wrapped]):
            for step in range(1 + rank):
                wrapped.zero_grad()
                loss_of(wrapped, rank, step).backward()
                # compare() is a collective; those that joined are not there to take part.
                live = [[g if r >= step else 0 * g for r, g in enumerate(c)] for c in rows[step]]
                for mine, want in zip(gradients(wrapped), defined(op, live), strict=True):
                    assert mine is not None
                    assert relative_error(mine, want) <= tolerance(torch.float32), (op, step)


def check_compression(rank: int) -> None:
    """Under torch's compression wrappers the compressed gradients are what is reduced."""
    model = Net()
    columns = columns_of(model, 0)
    for dtype, wrapper in (
        (torch.float16, default_hooks.fp16_compress_wrapper),
        (torch.bfloat16, default_hooks.bf16_compress_wrapper),
    ):
        short = [[g.to(dtype) for g in column] for column in columns]
        for op in OPS:
            for view in (False, True):
                wrapped = DistributedDataParallel(
                    copy.deepcopy(model), gradient_as_bucket_view=view, bucket_cap_mb=0.05
                )
                hook = wrapper(ddp_hook)
                # DDP refuses the bfloat16 one by its name where there is no NCCL.
                hook.__name__ = "wrapped_hook"
                wrapped.register_comm_hook(HookState(op=OPS[op]), hook)
                for _ in range(2):
                    wrapped.zero_grad()
                    loss_of(wrapped, rank, 0).backward()
                    got = gradients(wrapped)
                    assert all(g is not None and g.dtype == torch.float32 for g in got)
                    compare(got, op, short, dtype)


def check_precision(rank: int) -> None:
    """bfloat16 autocast over float32 parameters; bfloat16 and float64 parameters."""
    model = Net()

    def backward(replica: nn.Module, r: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(replica, r, 0)
        loss.backward()

    wrapped = wrap(model, "Adasum")
    backward(wrapped, rank)
    compare(gradients(wrapped), "Adasum", columns_of(model, 0, backward), torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        model = Net().to(dtype)
        wrapped = wrap(model, "Adasum")
        loss_of(wrapped, rank, 0).backward()
        compare(gradients(wrapped), "Adasum", columns_of(model, 0), dtype)


def check_channels_last(rank: int) -> None:
    """A model in torch.channels_last gets the gradients of a contiguous one, in its own strides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2)).double()
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank)).double()
    for op in OPS:
        found = []
        for order in (torch.contiguous_format, torch.channels_last):
            wrapped = wrap(model.to(memory_format=order), op)
            wrapped(x.to(memory_format=order)).square().sum().backward()
            found.append(gradients(wrapped))
        weight = next(wrapped.parameters())
        assert weight.grad is not None and weight.grad.stride() == weight.stride()
        for want, mine in zip(*found, strict=True):
            assert want is not None and mine is not None
            assert relative_error(mine, want) <= tolerance(torch.float64), op


def check_two_models(rank: int) -> None:
    """Two models in one backward, each with a state, and one state for two models."""
    models = [Net(), Net()]
    with torch.no_grad():
        models[1].last.bias.add_(1.0)
    columns = [columns_of(model, 0) for model in models]
    shared = HookState(op=hvd.Adasum)
    for states in ([HookState(op=hvd.Adasum), HookState(op=hvd.Average)], [shared, shared]):
        both = [wrap(model, state) for model, state in zip(models, states, strict=True)]
        (loss_of(both[0], rank, 0) + loss_of(both[1], rank, 0)).backward()
        for wrapped, state, column in zip(both, states, columns, strict=True):
            compare(gradients(wrapped), repr(state.op), column, torch.float32)


# Called in this order; what is not here does not run.
CHECKS: list[Callable[[int], None]] = [
    check_options,
    check_tree_order,
    check_unused,
    check_no_sync,
    check_join,
    check_compression,
    check_precision,
    check_channels_last,
    check_two_models,
    ddp_cases.check_gradient_recorder,
    ddp_cases.check_users_operators,
    ddp_cases.check_sparse,
    ddp_cases.check_process_group,
    ddp_complex.check_complex,
    ddp_complex.check_complex_observer,
    ddp_cases.check_moved_gradients,
    ddp_cases.check_copied_model,
    ddp_cases.check_mismatch,
    ddp_cases.check_mismatch_after_join,
    ddp_cases.check_absent_rank,
]
# These are about what a rank is told, whatever the number of ranks.
ONLY_TWO = (ddp_cases.check_mismatch_after_join, ddp_cases.check_absent_rank)


def selected(size: int) -> list[Callable[[int], None]]:
    """The checks that run on so many ranks."""
    return [check for check in CHECKS if size == 2 or check not in ONLY_TWO]


def ddp_job(rank: int, size: int) -> list[str]:
    """All checks, one after the other; the names of those that passed.

    The first runs without adasum.init(), over torch.distributed's world.
    """
    dist.init_process_group("gloo")
    first, *others = selected(size)
    passed = run_checks([first], rank)
    assert not hvd.is_initialized()
    hvd.init(timeout=60.0)
    return passed + run_checks(others, rank)
