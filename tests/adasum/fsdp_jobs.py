"""What ranks do under FSDP2 on a mesh (replicate, shard), against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import adasum as hvd
from adasum.ddp import HookState
from adasum.fsdp import register_fsdp_hook
from collectives import CollectiveMismatchError
from tests.adasum import fsdp_switches
from tests.adasum.ddp_complex import check_fsdp_complex
from tests.adasum.ddp_model import OPS, STEPS, USERS, loss_of, run_checks
from tests.adasum.fsdp_model import Odd, Ranks


def check_ops(ranks: Ranks) -> None:
    """Every op, step after step: dot products and norms are of whole parameters, not of shards."""
    model = Odd()
    columns = [ranks.columns(model, step) for step in range(STEPS)]
    cases = [(op, None) for op in (*OPS, *USERS)]
    for op, algorithm in (*cases, ("Adasum", "vhdd"), ("Adasum", "direct"), ("Longest", "psgpu#2")):
        wrapped = ranks.wrap(model, ranks.state(op, algorithm))
        for step in range(STEPS):
            wrapped.zero_grad()
            loss_of(wrapped, ranks.rank, step).backward()
            ranks.compare(wrapped, op, columns[step])


def check_other_dimension(ranks: Ranks) -> None:
    """Weights sharded by columns."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    for parameter in model.parameters():
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if ranks.shards == 3:
        return
    columns = ranks.columns(model, 0)
    wrapped = copy.deepcopy(model)
    fully_shard(wrapped, mesh=ranks.mesh["shard"], shard_placement_fn=lambda parameter: Shard(1))
    register_fsdp_hook(wrapped, ranks.state())
    loss_of(wrapped, ranks.rank, 0).backward()
    ranks.compare(wrapped, "Adasum", columns)


def check_precision(ranks: Ranks) -> None:
    """Gradients reduced in another dtype than the parameters'."""
    model = Odd()
    columns = ranks.columns(model, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        wrapped = ranks.wrap(model, ranks.state(), mp_policy=policy)
        loss_of(wrapped, ranks.rank, 0).backward()
        # Back in float32, whatever it was reduced in.
        wider = max(dtype, torch.float32, key=lambda d: torch.finfo(d).eps)
        ranks.compare(wrapped, "Adasum", columns, wider)


def check_arguments(ranks: Ranks) -> None:
    """What cannot work raises before any hook is installed."""
    state = ranks.state()
    with pytest.raises(ValueError, match="no fully_shard module"):
        register_fsdp_hook(nn.Linear(2, 2), state)
    with pytest.raises(ValueError, match="state needs process_group"):
        register_fsdp_hook(ranks.wrap(Odd(), None), HookState(op=hvd.Adasum))
    state.observer = object()
    with pytest.raises(ValueError, match="observer: cannot be used with FSDP"):
        register_fsdp_hook(ranks.wrap(Odd(), None), state)
    both = fully_shard(nn.Linear(2, 2), mesh=ranks.mesh)
    with pytest.raises(TypeError, match=r"got DeviceMesh: pass mesh.get_group\("):
        HookState(process_group=ranks.mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'a mesh of 2 dimensions.*mesh\["shard"\]'):
        register_fsdp_hook(both, ranks.state())


def check_mismatch(ranks: Ranks) -> None:
    """Where replicas disagree, backward raises the collective's own error."""
    model = ranks.wrap(Odd(), ranks.state(algorithm="rd" if ranks.rank < ranks.shards else "vhdd"))
    with pytest.raises(CollectiveMismatchError, match=r"FSDP unit .*algorithm=rd"):
        loss_of(model, ranks.rank, 0).backward()


def check_parameters(ranks: Ranks) -> None:
    """Replicas whose parameters differ raise on every replica of a shard, before they reduce."""
    if ranks.replicas == 1:
        return
    model = Odd()
    state = ranks.state("Average")
    with torch.no_grad():
        for each in model.inner.parameters():
            each.add_(float(ranks.rank // ranks.shards))
    with pytest.raises(CollectiveMismatchError, match=r"differ before .*HookState\(check_param"):
        loss_of(ranks.wrap(model, state), ranks.rank, 0).backward()
    state.check_parameters = False
    loss_of(ranks.wrap(model, state), ranks.rank, 0).backward()


CHECKS: list[Callable[[Ranks], None]] = [
    check_ops,
    check_other_dimension,
    check_precision,
    check_arguments,
    check_mismatch,
    check_parameters,
    check_fsdp_complex,
    *fsdp_switches.CHECKS,
]


def fsdp_job(rank: int, replicas: int, shards: int) -> list[str]:
    """All checks, over torch.distributed's world; the names of those that passed."""
    return run_checks(CHECKS, Ranks(replicas, shards))
