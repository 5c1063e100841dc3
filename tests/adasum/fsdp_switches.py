"""What ranks do with FSDP2's switches, with the hook, against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from adasum.fsdp import register_fsdp_hook
from tests.adasum.ddp_model import STEPS, loss_of, warnings_of
from tests.adasum.fsdp_model import Odd, Ranks


def accumulated(ranks: Ranks, model: nn.Module, steps: Sequence[int]) -> list[list[Tensor]]:
    """For each parameter each replica's sum of the steps' gradients."""

    def backward(replica: nn.Module, rank: int) -> None:
        for step in steps:
            loss_of(replica, rank, step).backward()

    return ranks.columns(model, 0, backward)


def train(model: nn.Module, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()


def check_without_all_reduce(ranks: Ranks) -> None:
    """What set_requires_all_reduce(False) adds up is reduced once, by the last backward."""
    model = Odd()
    columns = accumulated(ranks, model, range(STEPS))
    for op in ("Sum", "Average", "Adasum"):
        for last in (True, False):
            wrapped = ranks.wrap(model, ranks.state(op))
            for _ in range(2):
                wrapped.zero_grad()
                wrapped.set_requires_all_reduce(False)
                for step in range(STEPS):
                    if step == STEPS - 1:
                        wrapped.set_requires_all_reduce(True)
                    wrapped.set_is_last_backward(last or step == STEPS - 1)
                    assert all(p.grad is None for p in wrapped.parameters())
                    loss_of(wrapped, ranks.rank, step).backward()
                ranks.compare(wrapped, op, columns)


def as_over_a_mesh(ranks: Ranks, run: Callable[[Any], list[Tensor]]) -> None:
    """What `run` returns of a model with our Average is what it returns over FSDP2's own mesh."""
    both: list[list[Tensor]] = []
    for mesh in (ranks.mesh, ranks.mesh["shard"]):
        wrapped = Odd()
        # FSDP2 alone leaves it without a gradient.
        wrapped.never = nn.Identity()
        fully_shard(wrapped.inner, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        if mesh is not ranks.mesh:
            register_fsdp_hook(wrapped, ranks.state("Average"))
        both.append(run(wrapped))
    for ours, theirs in zip(*both, strict=True):
        assert ours.shape == theirs.shape
        # Each of at most 2 STEPS sums of so many ranks' gradients, and each mean, rounds once.
        bound = 4 * STEPS * ranks.replicas * ranks.shards * torch.finfo(ours.dtype).eps
        assert (ours - theirs).norm() <= bound * max(1.0, theirs.norm().item())


def gradients(model: nn.Module) -> list[Tensor]:
    """This rank's shards; empty tensors where there is none."""
    return [
        torch.empty(0) if p.grad is None else p.grad.to_local().clone() for p in model.parameters()
    ]


def check_without_all_reduce_as_over_a_mesh(ranks: Ranks) -> None:
    """Average, accumulated in each of three ways, is what FSDP2 itself makes of it on a mesh."""
    switches: list[Callable[[Any, bool], None]] = [
        lambda unit, on: unit.set_requires_all_reduce(on),
        lambda unit, on: unit.set_requires_gradient_sync(on),
        # Of the inner unit alone: the outer one reduces every backward.
        lambda unit, on: unit.inner.set_requires_all_reduce(on),
    ]
    for switch in switches:

        def run(wrapped: Any, switch: Callable[[Any, bool], None] = switch) -> list[Tensor]:
            seen = []
            # Twice, without zero_grad between.
            for step in range(2 * STEPS):
                switch(wrapped, step % STEPS == STEPS - 1)
                loss_of(wrapped, ranks.rank, step).backward()
                seen += gradients(wrapped)
            return seen

        as_over_a_mesh(ranks, run)


def check_reset(ranks: Ranks) -> None:
    """reset_iter_state drops what was added up, as FSDP2 does over a mesh of two dimensions."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        return
    model = Odd()
    wrapped = ranks.wrap(model, ranks.state())
    wrapped.set_requires_all_reduce(False)
    train(wrapped, ranks.rank, [0, 2])
    wrapped.reset_iter_state()
    wrapped.set_requires_all_reduce(True)
    train(wrapped, ranks.rank, [1])
    ranks.compare(wrapped, "Adasum", accumulated(ranks, model, [1]))

    def interrupted(wrapped: Any) -> list[Tensor]:
        wrapped.set_requires_all_reduce(False)
        train(wrapped, ranks.rank, [0, 2])
        # After the inner unit's gradients have been added, before the outer one's.
        handle = wrapped.first.register_full_backward_pre_hook(lambda *_: 1 / 0)
        loss = loss_of(wrapped, ranks.rank, 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        wrapped.reset_iter_state()
        train(wrapped, ranks.rank, [0])
        wrapped.set_requires_all_reduce(True)
        train(wrapped, ranks.rank, [1])
        return gradients(wrapped)

    as_over_a_mesh(ranks, interrupted)


def check_other_switches(ranks: Ranks) -> None:
    """Switches that leave the answer as it is."""
    model = Odd()
    columns = [accumulated(ranks, model, [step]) for step in range(STEPS)]
    switches: list[Callable[[Any], None]] = [
        lambda unit: unit.set_reshard_after_backward(False),
        lambda unit: unit.set_reshard_after_forward(False),
        # The outermost unit stays whole after forward.
        lambda unit: unit.set_unshard_in_backward(False),
        lambda unit: unit.set_is_last_backward(False),
        lambda unit: unit.set_modules_to_backward_prefetch([unit.inner]),
        lambda unit: unit.set_modules_to_forward_prefetch([unit.inner]),
        lambda unit: unit.set_force_sum_reduction_for_comms(True),
        lambda unit: unit.inner.set_force_sum_reduction_for_comms(True),
        lambda unit: unit.set_reduce_scatter_max_input_buffers(2),
        lambda unit: unit.set_separate_reduce_scatter_group(),
    ]
    for switch in switches:
        wrapped = ranks.wrap(model, ranks.state())
        try:
            switch(wrapped)
        except AttributeError:
            # An older torch.
            continue
        for step in range(STEPS):
            wrapped.zero_grad()
            loss_of(wrapped, ranks.rank, step).backward()
            for unit in (wrapped, wrapped.inner):
                unit.reshard()
            ranks.compare(wrapped, "Adasum", columns[step])


def check_offload(ranks: Ranks) -> None:
    """Parameters and gradients that live on the host, added up and not."""
    model = Odd()
    policy = CPUOffloadPolicy(pin_memory=False)
    wrapped = ranks.wrap(model, ranks.state(), offload_policy=policy)
    for steps in ([0], [0, 1, 2]):
        wrapped.zero_grad()
        wrapped.set_requires_all_reduce(False)
        train(wrapped, ranks.rank, steps[:-1])
        wrapped.set_requires_all_reduce(True)
        train(wrapped, ranks.rank, steps[-1:])
        ranks.compare(wrapped, "Adasum", accumulated(ranks, model, steps))


def check_divide_factor(ranks: Ranks) -> None:
    """What a replica's shards sum is divided by the factor, before the replicas are reduced."""
    model = Odd()
    for op in ("Sum", "Adasum"):
        wrapped = ranks.wrap(model, ranks.state(op))
        for unit in (wrapped, wrapped.inner):
            # gloo has no premultiplied sum.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(0.5)
        train(wrapped, ranks.rank, [0])
        columns = accumulated(ranks, model, [0])
        scaled = [[2.0 * ranks.shards * g for g in column] for column in columns]
        if ranks.shards > 1:
            # FSDP itself divides twice where it does not shard.
            ranks.compare(wrapped, op, scaled)


def check_switch_arguments(ranks: Ranks) -> None:
    """What would go wrong in silence is an error or a warning."""
    wrapped = ranks.wrap(Odd(), ranks.state())
    wrapped.set_requires_all_reduce(False)
    for parameter in wrapped.inner.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(NotImplementedError, match="register_post_accumulate_grad_hook"):
        train(wrapped, ranks.rank, [0])

    wrapped = ranks.wrap(Odd(), None)
    wrapped.inner.set_all_reduce_hook(print)
    with pytest.raises(ValueError, match="a unit has an all-reduce hook"):
        register_fsdp_hook(wrapped, ranks.state())

    wrapped = ranks.wrap(Odd(), ranks.state())
    wrapped.set_requires_all_reduce(False)
    train(wrapped, ranks.rank, [0])
    wrapped.set_requires_all_reduce(True)
    wrapped.last.requires_grad_(False)
    with pytest.raises(RuntimeError, match="in the backward passes before it"):
        train(wrapped, ranks.rank, [1])

    late = copy.deepcopy(Odd())
    fully_shard(late.inner, mesh=ranks.mesh["shard"])
    register_fsdp_hook(late, ranks.state())
    fully_shard(late, mesh=ranks.mesh["shard"])
    with warnings_of("adasum.fsdp") as texts:
        train(late, ranks.rank, [0, 1])
    assert len(texts) == 1
    count = 7 + 2 * hasattr(late, "never")
    assert f"{count} parameters, first.weight first, are in units without a hook" in texts[0]
    with warnings_of("adasum.fsdp") as texts:
        register_fsdp_hook(late, ranks.state())
        train(late, ranks.rank, [0])
    assert texts == []


CHECKS: list[Callable[[Ranks], None]] = [
    check_without_all_reduce,
    check_without_all_reduce_as_over_a_mesh,
    check_reset,
    check_other_switches,
    check_offload,
    check_divide_factor,
    check_switch_arguments,
]
