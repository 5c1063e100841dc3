"""Cases under DistributedDataParallel: observers, pickling, groups, failures."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from collectives import CollectiveMismatchError, CollectiveTimeoutError
from tests.adasum.ddp_model import (
    TINY,
    USERS,
    Net,
    columns_of,
    compare,
    defined,
    gradients,
    loss_of,
    warnings_of,
    wrap,
)
from tests.adasum.definition import relative_error, tolerance


class Recorder:
    """An observer that keeps what it sees."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def before_reduction(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        self.before.update({n: t.clone() for n, t in zip(names, tensors, strict=True)})
        return list(names)

    def after_reduction(self, token: Any, tensors: Sequence[Tensor]) -> None:
        self.after.update({n: t.clone() for n, t in zip(token, tensors, strict=True)})


def check_gradient_recorder(rank: int) -> None:
    """It has every rank's norms of each parameter, with and without Gram matrices."""
    for algorithm in ("rd", "direct"):
        model = Net()
        wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.05)
        recorder = hvd.GradientRecorder()
        named = wrapped.module.named_parameters()
        state = HookState(hvd.Adasum, algorithm, observer=recorder, named_parameters=named)
        wrapped.register_comm_hook(state, ddp_hook)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(wrapped, rank, step).backward()
            rows = {row.name: row for row in recorder.rows if row.step == step}
            for (name, _), column in zip(
                model.named_parameters(), columns_of(model, step), strict=True
            ):
                row = rows.pop(name)
                for norm, gradient in zip(row.norms, column, strict=True):
                    # Twice: of the gradients, and of the parameters that these are of.
                    want = gradient.double().norm().item()
                    assert abs(norm - want) <= 2 * tolerance(torch.float32) * want, name
                assert (row.agreements[0] == row.agreements[0]) is (algorithm == "direct")
            assert set(rows) == {"all layers"}


def check_users_operators(rank: int) -> None:
    """What needs all ranks' gradients at once has them; otherwise the state refuses."""
    model = Net()
    for op, algorithm in (("Trimmed", None), ("Trimmed", "psgpu#2"), ("Longest", None)):
        for layout in ({"bucket_cap_mb": TINY}, {"gradient_as_bucket_view": True}):
            wrapped = wrap(model, op, algorithm=algorithm, **layout)
            loss_of(wrapped, rank, 0).backward()
            compare(gradients(wrapped), op, columns_of(model, 0), torch.float32)
    with pytest.raises(ValueError, match="use direct, bruck, oneshot, psgpu, pscpu"):
        HookState(op=USERS["Trimmed"], algorithm="rd")


def check_sparse(rank: int) -> None:
    """A sparse gradient is summed or averaged; Adasum refuses it."""
    size = dist.get_world_size()
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    # Rows 0 and 1 + r, twice the latter: indices shared and not, and repeated.
    places = [torch.tensor([0, 1 + r, 1 + r]) for r in range(size)]

    def backward(model: nn.Module, r: int) -> Tensor:
        model(places[r]).square().sum().backward()
        return model.weight.grad if isinstance(model, nn.Embedding) else model.module.weight.grad

    def embedding() -> nn.Embedding:
        return nn.Embedding.from_pretrained(weights.clone(), freeze=False, sparse=True)

    dense = [backward(embedding(), r).to_dense().double() for r in range(size)]
    total = torch.stack(dense).sum(0)
    for op, want in (("Sum", total), ("Average", total / size)):
        wrapped = wrap(embedding(), op)
        for _ in range(2):
            wrapped.zero_grad()
            got = backward(wrapped, rank)
            assert got.is_sparse
            error = relative_error(got.to_dense(), want)
            # n additions and a division, no term opposed to another in row 0, the only shared one.
            assert error <= size * torch.finfo(torch.float32).eps, (op, error)
    with pytest.raises(NotImplementedError, match="Adasum of sparse tensors"):
        backward(wrap(embedding(), "Adasum"), rank)


def check_mismatch(rank: int) -> None:
    """Where ranks disagree, backward raises the collective's own error; the model works on."""
    model = Net()
    for hook in (ddp_hook, default_hooks.fp16_compress_wrapper(ddp_hook)):
        wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.05)
        state = HookState(op=hvd.Adasum, algorithm="rd" if rank == 1 else "vhdd")
        wrapped.register_comm_hook(state, hook)
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError, match=r"DDP bucket .*algorithm=rd"):
                loss_of(wrapped, rank, 0).backward()
        state.algorithm = "vhdd"
        wrapped.zero_grad()
        loss_of(wrapped, rank, 0).backward()
        dtype = torch.float32 if hook is ddp_hook else torch.float16
        columns = [[g.to(dtype) for g in column] for column in columns_of(model, 0)]
        compare(gradients(wrapped), "Adasum", columns, dtype)


def check_mismatch_after_join(rank: int) -> None:
    """The same where rank 0 has joined: there the Join context raises the error."""
    wrapped = wrap(Net(), "Adasum", algorithm="rd" if rank == 0 else "vhdd")

    def train() -> None:
        with Join([wrapped]):
            if rank != 0:
                loss_of(wrapped, rank, 0).backward()

    with pytest.raises(CollectiveMismatchError, match="DDP bucket 0"):
        train()


def check_process_group(rank: int) -> None:
    """Ranks 0 and 1 alone, by a process group that DDP and the state are given."""
    pair = dist.new_group([0, 1])
    if rank > 1:
        return
    model = Net()
    wrapped = wrap(model, HookState(op=hvd.Adasum, process_group=pair), process_group=pair)
    loss_of(wrapped, rank, 0).backward()
    columns = [column[:2] for column in columns_of(model, 0)]
    for mine, want in zip(gradients(wrapped), defined("Adasum", columns), strict=True):
        assert mine is not None and relative_error(mine, want) <= tolerance(torch.float32)


def check_absent_rank(rank: int) -> None:
    """Where a rank never comes, backward raises a timeout that names it, in time."""
    own = dist.new_group()
    wrapped = wrap(Net(), HookState(op=hvd.Adasum, process_group=own, timeout=1.0))
    for _ in range(2):  # DDP itself talks while it rebuilds its buckets, before the second
        loss_of(wrapped, rank, 0).backward()
    if rank != 0:
        loss = loss_of(wrapped, rank, 0)
        started = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"rank 0.*DDP bucket"):
            loss.backward()
        assert time.monotonic() - started < 1.0 + 5.0
    dist.barrier()


def check_moved_gradients(rank: int) -> None:
    """A gradient that was moved out of its bucket is an error on every rank that names it."""

    def last(model: DistributedDataParallel) -> None:
        model.module.last.bias.grad.data = torch.zeros(3)

    def all_of_them(model: DistributedDataParallel) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()

    for wrapper in (None, default_hooks.fp16_compress_wrapper):
        for change in (last, all_of_them):
            for ranks in ({0, 1, 2, 3}, {1}):
                model = Net()
                wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
                names = dict(model.named_parameters())
                state = HookState(op=hvd.Adasum, named_parameters=names.items())
                hook = wrapper(ddp_hook) if wrapper else ddp_hook
                wrapped.register_comm_hook(state, hook)
                for _ in range(2):
                    loss_of(wrapped, rank, 0).backward()
                if rank in ranks:
                    change(wrapped)
                error = RuntimeError if rank in ranks else CollectiveMismatchError
                with pytest.raises(error, match=r"the gradient of \w+\.\w+ was moved"):
                    loss_of(wrapped, rank, 1).backward()
                # The way out that the error names.
                again = DistributedDataParallel(model, gradient_as_bucket_view=True)
                again.register_comm_hook(state, hook)
                again.zero_grad()
                loss_of(again, rank, 1).backward()
                if wrapper is None:
                    columns = columns_of(model, 1)
                    compare(gradients(again), "Adasum", columns, torch.float32)


def check_copied_model(rank: int) -> None:
    """A copy says that it has no hook; its state is complete, and has names for its parameters."""
    model, pair = Net(), dist.new_group()
    names = dict(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    state = HookState(op=hvd.Adasum, process_group=pair, named_parameters=names.items())
    wrapped.register_comm_hook(state, ddp_hook)
    with warnings_of("adasum.ddp") as texts:
        assert copy.deepcopy(state).process_group is pair
    assert texts == []
    with warnings_of("adasum.ddp") as texts:
        copied = copy.deepcopy(wrapped)
    assert len(texts) == 1
    assert "call register_comm_hook on it" in texts[0]
    ((_, other),) = copied._comm_hooks
    assert other is not state
    assert other.process_group is pair
    for name, parameter in copied.module.named_parameters():
        assert other.name_of(parameter) == name
    copied.register_comm_hook(other, ddp_hook)
    columns = columns_of(model, 0)
    for each in (copied, wrapped):
        loss_of(each, rank, 0).backward()
        compare(gradients(each), "Adasum", columns, torch.float32)
