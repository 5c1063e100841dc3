"""Passes that torch adds under no_sync(): DDP's hook warns where their sum is not the tree."""

from __future__ import annotations

import copy
import itertools
import pickle
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState
from adasum.pass_counter import PassCounter
from tests.adasum import ddp_model
from tests.adasum.ddp_model import TINY, Net, loss_of, run_checks, warnings_of
from tests.processes.harness import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": TINY},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.05},
]


def wrap(order: str | None = "tree", **layout: Any) -> DistributedDataParallel:
    return ddp_model.wrap(Net(), HookState(hvd.Sum, order=order), **layout)


def step(model: DistributedDataParallel, rank: int, passes: int, to_none: bool = True) -> None:
    model.zero_grad(set_to_none=to_none)
    for number in range(passes):
        with model.no_sync() if number < passes - 1 else nullcontext():
            loss_of(model, rank, number).backward()


def check_warnings(rank: int) -> None:
    """More than two passes are a warning, once, from the second step on; fewer never are."""
    for layout, passes, to_none in itertools.product(LAYOUTS, (2, 3), (True, False)):
        case = layout, passes, to_none
        with warnings_of("adasum.ddp") as found:
            model = wrap(**layout)
            # torch's own first step of a static graph fails under no_sync().
            step(model, rank, 1 if "static_graph" in layout else passes, to_none)
            assert not found, case
            for _ in range(4):
                step(model, rank, passes, to_none)
        assert len(found) == (passes > 2), (case, found)
        assert all(
            f"sums of {passes} backward passes" in text
            and f'(backward_passes_per_step={passes}, order="tree")' in text
            for text in found
        )


def check_left_out_passes(rank: int) -> None:
    """Passes whose gradients the user has thrown away are not in the sum."""
    for layout, to_none in itertools.product(LAYOUTS, (True, False)):
        with warnings_of("adasum.ddp") as found:
            model = wrap(**layout)
            step(model, rank, 1, to_none)
            for _ in range(3):
                step(model, rank, 2, to_none)
                with model.no_sync():
                    for number in range(3):
                        loss_of(model, rank, number).backward()
                model.zero_grad(set_to_none=to_none)
        assert not found, (layout, to_none)


def check_other_states(rank: int) -> None:
    """Without an order nothing is counted; copies and pickles count for themselves."""
    with warnings_of("adasum.ddp") as found:
        model = wrap(order=None)
        for _ in range(3):
            step(model, rank, 3)
        assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    assert not found
    state = HookState(hvd.Sum, order="tree")
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert isinstance(other._passes, PassCounter) and other._passes is not state._passes


def check_end(rank: int) -> None:
    """After the warning no hook is left on any parameter."""
    model = wrap()
    step(model, rank, 3)
    assert all(each._post_accumulate_grad_hooks for each in model.parameters())
    step(model, rank, 3)
    step(model, rank, 3)
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


CHECKS = (check_warnings, check_left_out_passes, check_other_states, check_end)


def job(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    return run_checks(CHECKS, rank)


def test_hook_warns_of_passes_whose_sum_is_no_tree_and_of_no_others() -> None:
    assert run_ranks(2, job, timeout=150.0) == [[each.__name__ for each in CHECKS]] * 2


def leaves_job(rank: int, passes: int) -> list[Tensor]:
    """The gradients of four leaves, which each rank has `passes` of."""
    dist.init_process_group("gloo")
    model = wrap(bucket_cap_mb=0.05)
    for number in range(passes):
        with model.no_sync() if number < passes - 1 else nullcontext():
            loss_of(model, rank * passes + number, 0).backward()
    found = [each.grad for each in model.parameters()]
    dist.destroy_process_group()
    return [each for each in found if each is not None]


def test_one_and_two_passes_of_four_and_two_ranks_have_the_same_bits() -> None:
    first, *others = [*run_ranks(4, leaves_job, 1), *run_ranks(2, leaves_job, 2)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_gradient_in_other_memory_is_a_first_pass_again() -> None:
    parameter, counter = torch.nn.Parameter(torch.ones(3)), PassCounter()
    counter.take([parameter])
    kept = []
    for passes in (3, 2):
        parameter.grad = torch.zeros(3)
        kept.append(parameter.grad)
        for _ in range(passes):
            parameter.sum().backward()
    assert counter.take([parameter]) == 2
