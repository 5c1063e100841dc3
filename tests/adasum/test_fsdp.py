"""FSDP2's own sums over the shards with order="tree", by the hook, over plain gloo groups."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import adasum as hvd
from tests.adasum.ddp_model import defined, run_checks
from tests.adasum.definition import relative_error, tolerance
from tests.collectives.test_tree_order import reference, same_bits
from tests.processes.harness import run_ranks

STEPS = 30


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7))


def shard(model: nn.Sequential, **options: Any) -> Any:
    """Two units, one inside the other."""
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, leaf: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    loss: Tensor = model(torch.randn(16, 33, generator=generator)).square().mean()
    return loss


def gradients_of(model: nn.Module, leaf: int) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, leaf).backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def train(rank: int, size: int, leaves: int, wire: bool) -> str:
    """Train, and return a hash of the parameters."""
    dist.init_process_group("gloo")
    halves: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if wire else {}
    model = shard(model_of(), mp_policy=MixedPrecisionPolicy(**halves))
    state, wire_dtype = hvd.HookState(order="tree", timeout=60.0), torch.bfloat16 if wire else None
    hvd.register_fsdp_hook(model, state, wire_dtype=wire_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    passes = leaves // size
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            # As docs/bits.md says: FSDP adds two passes, and then two such sums. What it adds
            # before the reduce-scatter would be rounded to the wire's dtype.
            together = 1 if wire else min(passes, 2)
            before = number // together * together * size
            leaf = before + rank * together + number % together
            model.set_requires_gradient_sync(number % together == together - 1)
            (loss_of(model, leaf, step) / passes).backward()
        optimizer.step()
    whole = [each.full_tensor().detach().flatten() for each in model.parameters()]
    dist.destroy_process_group()
    return hashlib.sha256(torch.cat(whole).numpy().tobytes()).hexdigest()


def hashes(sizes: tuple[int, ...], leaves: int, wire: bool) -> set[str]:
    found: set[str] = set()
    for size in sizes:
        found.update(run_ranks(size, train, size, leaves, wire, timeout=150.0))
    return found


@pytest.mark.parametrize("wire", [False, True], ids=["float32", "bfloat16 on the wire"])
def test_training_of_four_leaves_has_the_same_bits_on_4_and_2_ranks(wire: bool) -> None:
    assert len(hashes((4, 2), 4, wire)) == 1


@pytest.mark.slow
def test_training_of_eight_leaves_has_the_same_bits_on_8_4_and_2_ranks() -> None:
    assert len(hashes((8, 4, 2), 8, wire=False)) == 1
    assert len(hashes((8, 4), 8, wire=True)) == 1


def check_sums(rank: int) -> None:
    """Every sum is the tree over the shards, whatever FSDP divides by."""
    columns = list(zip(*(gradients_of(model_of(), leaf) for leaf in range(3)), strict=True))
    for factor, scale in ((None, 1 / 3), (1.0, 1.0), (3.0, 1 / 3), (4.0, 0.25)):
        for accumulate in (None, torch.float32):
            model = shard(model_of())
            state = hvd.HookState(hvd.Sum, order="tree", accumulate=accumulate, timeout=60.0)
            hvd.register_fsdp_hook(model, state)
            if factor is not None:
                for unit in (model, model[0]):
                    unit.set_gradient_divide_factor(factor)
            loss_of(model, rank).backward()
            for each, column in zip(model.parameters(), columns, strict=True):
                want = reference(column, hvd.Sum, None)
                want = want.div(3) if scale == 1 / 3 else want.mul(scale)
                assert same_bits(each.grad.full_tensor(), want), (factor, accumulate)


def check_wire(rank: int) -> None:
    """On the wire is what was rounded to bfloat16; the float32 sum of it is not rounded."""
    columns = list(zip(*(gradients_of(model_of(), leaf) for leaf in range(3)), strict=True))
    model = shard(model_of(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    state = hvd.HookState(order="tree", timeout=60.0)
    hvd.register_fsdp_hook(model, state, wire_dtype=torch.bfloat16)
    loss_of(model, rank).backward()
    for each, column in zip(model.parameters(), columns, strict=True):
        rounded = [gradient.bfloat16().float() for gradient in column]
        want = reference(rounded, hvd.Average, None)
        assert each.grad.dtype == torch.float32
        assert same_bits(each.grad.full_tensor(), want)


def check_async(rank: int) -> None:
    """What FSDP would call with async_op returns what can be waited for."""
    model = shard(model_of())
    given: list[Any] = []
    model.set_custom_reduce_scatter = given.append
    hvd.register_fsdp_hook(model, hvd.HookState(order="tree", timeout=60.0))
    (reduce_scatter,) = given
    sent = torch.arange(6.0)
    out = reduce_scatter.allocate((2,), dtype=torch.float32, device=torch.device("cpu"))
    op: Any = dist.ReduceOp.SUM
    work = reduce_scatter(out, sent, group=dist.group.WORLD, op=op, async_op=True)
    work.wait()
    assert torch.equal(out, 3 * sent[2 * rank : 2 * rank + 2])


def check_arguments(rank: int) -> None:
    model, state = shard(model_of()), hvd.HookState(order="tree")
    with pytest.raises(TypeError, match=r"wire_dtype must be .* got torch\.float32"):
        hvd.register_fsdp_hook(model, state, wire_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"'op': pass it to HookState\(op="):
        hvd.register_fsdp_hook(model, state, op=hvd.Sum)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got AdasumReducer: pass adasum.HookState\(op="):
        hvd.register_fsdp_hook(model, hvd.Adasum)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wire_dtype is for sums with an order"):
        hvd.register_fsdp_hook(model, hvd.HookState(), wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="order must be 'tree' or None, got 'ring'"):
        hvd.register_fsdp_hook(model, state, order="ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'state needs process_group, .* or, .*order="tree"'):
        hvd.register_fsdp_hook(model, hvd.HookState())
    with pytest.raises(ValueError, match="state needs process_group"):
        # Adasum over replicas that are not named.
        hvd.register_fsdp_hook(model, hvd.HookState(hvd.Adasum), order="tree")


CHECKS = (check_sums, check_wire, check_async, check_arguments)


def shards_job(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    return run_checks(CHECKS, rank)


def test_sums_over_three_shards_are_the_tree() -> None:
    assert run_ranks(3, shards_job, timeout=150.0) == [[each.__name__ for each in CHECKS]] * 3


def replicas_job(rank: int) -> None:
    """Two replicas of two shards: with Sum over replicas the tree over all, else Adasum of it."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    columns = list(zip(*(gradients_of(model_of(), leaf) for leaf in range(4)), strict=True))
    for op in (hvd.Sum, hvd.Adasum):
        model = shard(model_of(), mesh=mesh["shard"])
        order: Any = {"order": "tree"} if op is hvd.Sum else {}
        state = hvd.HookState(op, process_group=mesh.get_group("replicate"), timeout=60.0, **order)
        hvd.register_fsdp_hook(model, state, order="tree")
        loss_of(model, rank).backward()
        means = [
            [reference(column[i : i + 2], hvd.Average, None) for i in (0, 2)] for column in columns
        ]
        wanted = defined("Adasum", means)
        for each, mean, want in zip(model.parameters(), means, wanted, strict=True):
            got = each.grad.full_tensor()
            if op is hvd.Sum:
                assert same_bits(got, mean[0] + mean[1])
            else:
                assert relative_error(got, want) <= tolerance(torch.float32)


def test_replicas_reduce_what_the_shards_have_summed_in_order() -> None:
    run_ranks(4, replicas_job, timeout=150.0)
