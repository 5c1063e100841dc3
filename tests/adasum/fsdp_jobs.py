"""What ranks do under FSDP2 on a mesh (replicate, shard), against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import adasum as hvd
from adasum.ddp import HookState
from adasum.fsdp import register_fsdp_hook
from collectives import CollectiveMismatchError
from tests.adasum.ddp_model import OPS, STEPS, defined, loss_of, plain
from tests.adasum.definition import relative_error, tolerance, trajectory_tolerance


class Odd(nn.Module):
    """Rows that no number of shards divides, one row alone, a frozen layer, one left out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 130)
        self.frozen = nn.Linear(130, 130)
        self.inner = nn.Sequential(nn.Linear(130, 131), nn.Tanh(), nn.Linear(131, 7))
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            self.never = nn.Linear(7, 3)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.inner(torch.tanh(self.frozen(x))))) * self.scale


class Ranks:
    """The mesh, and this rank's coordinates on it."""

    def __init__(self, replicas: int, shards: int) -> None:
        names = ("replicate", "shard")
        self.mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
        self.replicas, self.shards = replicas, shards
        self.rank = dist.get_rank()

    def state(self, op: str = "Adasum", algorithm: str | None = None) -> HookState:
        group = self.mesh.get_group("replicate")
        return HookState(op=OPS[op], algorithm=algorithm, process_group=group, timeout=60.0)

    def wrap(self, model: nn.Module, state: HookState | None, **options: Any) -> FSDPModule:
        """Two units, one inside the other; without a hook for state None."""
        model = copy.deepcopy(model)
        mesh: DeviceMesh = self.mesh["shard"]
        fully_shard(model.inner, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        if state is not None:
            register_fsdp_hook(model, state)
        return model

    def columns(
        self, model: nn.Module, step: int, backward: Callable[[nn.Module, int], None] | None = None
    ) -> list[list[Tensor]]:
        """For each parameter its gradient on every replica: the mean over the replica's shards."""

        def simple(replica: nn.Module, rank: int) -> None:
            loss_of(replica, rank, step).backward()

        run = backward or simple
        rows = [
            plain(model, lambda m, r=rank: run(m, r)) for rank in range(self.replicas * self.shards)
        ]
        return [
            list(torch.stack(column).double().unflatten(0, (-1, self.shards)).mean(1).unbind())
            for column in zip(*rows, strict=True)
        ]

    def compare(
        self,
        model: nn.Module,
        op: str,
        columns: Sequence[Sequence[Tensor]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """The whole gradient equals the definition, and replicas hold the same bits."""
        for index, ((name, parameter), want) in enumerate(
            zip(model.named_parameters(), defined(op, columns), strict=True)
        ):
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            local = parameter.grad.to_local()
            first = local.clone()
            group = self.mesh.get_group("replicate")
            dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
            assert torch.equal(first, local), f"{name} differs from replica 0's"
            # FSDP's mean over the shards rounds to a part of the gradients' size, not the answer's.
            size = sum(g.norm().item() for g in columns[index])
            error = (parameter.grad.full_tensor().double() - want).norm().item()
            assert error <= tolerance(dtype) * size, (name, error)


def check_ops(ranks: Ranks) -> None:
    """Every op, step after step: Adasum takes dot products of whole parameters, not of shards."""
    model = Odd()
    columns = [ranks.columns(model, step) for step in range(STEPS)]
    for op, algorithm in (("Sum", None), ("Average", None), ("Adasum", None), ("Adasum", "vhdd")):
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


def check_accumulation(ranks: Ranks) -> None:
    """What set_requires_gradient_sync(False) accumulates is reduced by the last backward."""
    model = Odd()

    def backward(replica: nn.Module, rank: int) -> None:
        for step in range(STEPS):
            if isinstance(replica, FSDPModule):
                replica.set_requires_gradient_sync(step == STEPS - 1)
            loss_of(replica, rank, step).backward()

    wrapped = ranks.wrap(model, ranks.state())
    backward(wrapped, ranks.rank)
    ranks.compare(wrapped, "Adasum", ranks.columns(model, 0, backward))


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


def check_training(ranks: Ranks) -> None:
    """Clipping and AdamW by whole gradients, in float64, equal those by the definition's."""
    model = Odd().double()
    wrapped = ranks.wrap(model, ranks.state())
    ours = torch.optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        answer = defined("Adasum", ranks.columns(model, step))
        for parameter, gradient in zip(model.parameters(), answer, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None
        ours.zero_grad()
        loss_of(wrapped, ranks.rank, step).backward()
        for each, optimizer in ((model, theirs), (wrapped, ours)):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
    for a, b in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert relative_error(a.full_tensor(), b.detach()) <= trajectory_tolerance(STEPS)


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
    with pytest.raises(ValueError, match="a mesh of 2 dimensions"):
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
    check_accumulation,
    check_precision,
    check_training,
    check_arguments,
    check_mismatch,
    check_parameters,
]


def fsdp_job(rank: int, replicas: int, shards: int) -> list[str]:
    """All checks, over torch.distributed's world; the names of those that passed."""
    ranks = Ranks(replicas, shards)
    passed = []
    for check in CHECKS:
        try:
            check(ranks)
        except BaseException as error:
            raise AssertionError(f"FSDP {check.__name__}: {error!r}") from error
        passed.append(check.__name__)
    return passed
