"""A model for FSDP2 on a mesh (replicate, shard), and what its gradients are to become."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from adasum.ddp import HookState
from adasum.fsdp import register_fsdp_hook
from tests.adasum.ddp_model import defined, loss_of, operator, plain
from tests.adasum.definition import tolerance


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
        return HookState(operator(op), algorithm, process_group=group, timeout=60.0)

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
        """The whole gradient equals the definition, and replicas hold the same bits.

        Each rank compares its shards: with two messages, since many small ones take long.
        """
        names, mine, squares, sizes = [], [], [], []
        for index, ((name, parameter), want) in enumerate(
            zip(model.named_parameters(), defined(op, columns), strict=True)
        ):
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            local = parameter.grad.to_local()
            part = self._shard_of(want, parameter.grad.placements)
            assert parameter.grad.shape == want.shape and local.shape == part.shape, name
            names.append(name)
            mine.append(local.reshape(-1))
            squares.append((local.double() - part).square().sum())
            # FSDP's mean over the shards rounds to a part of the gradients' size, not the answer's.
            sizes.append(sum(g.norm().item() for g in columns[index]))
        # Parameters of one model may differ in dtype; as float64 each keeps its bits.
        whole = torch.cat([local.double() for local in mine])
        first = whole.clone()
        group = self.mesh.get_group("replicate")
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        assert torch.equal(first, whole), "gradients differ from replica 0's"
        errors = torch.stack(squares)
        dist.all_reduce(errors, group=self.mesh.get_group("shard"))
        for name, error, size in zip(names, errors.sqrt().tolist(), sizes, strict=True):
            assert error <= tolerance(dtype) * size, (name, error)

    def _shard_of(self, whole: Tensor, placements: Sequence[Any]) -> Tensor:
        """This rank's part, torch.chunk's as Shard documents; empty beyond the last."""
        (placement,) = placements
        parts = whole.chunk(self.shards, placement.dim)
        here = self.mesh.get_local_rank("shard")
        return parts[here] if here < len(parts) else whole.narrow(placement.dim, 0, 0)
