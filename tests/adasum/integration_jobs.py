"""What ranks do with the integrations: each framework's steps against their definition."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import adasum
from adasum.integrations.registration import refuse_distributed_optimizer, register
from tests.adasum.definition import pair

RATE, LIMIT, PASSES, BATCH = 0.1, 0.05, 2, 3
# Sums of a few dozen products of numbers near 1, over four steps.
TOLERANCE = 1000 * torch.finfo(torch.float64).eps


class Net(nn.Module):
    """A small model in float64 that keeps what each backward pass was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.seen.append((x.detach().clone(), y.detach().clone()))
        return {"loss": loss_of(self.layers, x, y)}


def loss_of(layers: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (layers(x) - y).square().mean()


def examples(count: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(count, n, generator=numbers, dtype=torch.float64) for n in (4, 2))
    return TensorDataset(x, y)


def defined(columns: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    """The parameters after plain SGD on the clipped Adasum of both ranks' mean gradients."""
    layers = Net().layers
    parameters = list(layers.parameters())
    for first in range(0, len(columns[0]), PASSES):
        gradients = []
        for seen in columns:
            losses = [loss_of(layers, x, y) for x, y in seen[first : first + PASSES]]
            found = torch.autograd.grad(torch.stack(losses).mean(), parameters)
            gradients.append([each.flatten() for each in found])
        reduced = [pair((a, 1), (b, 1), [0, a.numel()])[0] for a, b in zip(*gradients, strict=True)]
        norm = torch.cat(reduced).norm()
        assert norm > LIMIT
        with torch.no_grad():
            for parameter, each in zip(parameters, reduced, strict=True):
                # torch's own formula.
                parameter -= RATE * LIMIT / (norm + 1e-6) * each.view_as(parameter)
    return [each.detach() for each in parameters]


def compare(net: Net, steps: int) -> None:
    """Hold the trained parameters to the definition, on what every rank was given."""
    assert len(net.seen) == steps * PASSES
    columns: list[Any] = [None, None]
    dist.all_gather_object(columns, net.seen)
    for got, want in zip(net.layers.parameters(), defined(columns), strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=TOLERANCE, atol=TOLERANCE)


def as_torchrun() -> None:
    """Say what torchrun says and the tests' harness does not."""
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="1", ACCELERATE_USE_CPU="1")
    warnings.simplefilter("ignore")


def state() -> adasum.HookState:
    return adasum.HookState(op=adasum.Adasum)


def check_registration(rank: int) -> None:
    """The hook is registered once, also inside of other wrappers; where it cannot be, an error."""
    dist.init_process_group("gloo")
    net, adasum_state = Net(), state()
    wrapped = DistributedDataParallel(net)
    for model in (nn.ModuleList([wrapped]), wrapped):
        register(model, adasum_state, 2, "advice")
    with pytest.raises(RuntimeError, match=r"has another communication hook, and takes one"):
        register(wrapped, state(), 2, "advice")
    x, y = examples(2)[rank]
    wrapped(x[None], y[None])["loss"].backward()
    gradients = [each.grad.flatten() for each in net.parameters()]
    columns: list[Any] = [None, None]
    dist.all_gather_object(columns, net.seen)
    layers = Net().layers
    own = [torch.autograd.grad(loss_of(layers, *seen[0]), layers.parameters()) for seen in columns]
    for got, *two in zip(gradients, *own, strict=True):
        a, b = (each.flatten() for each in two)
        want, _ = pair((a, 1), (b, 1), [0, a.numel()])
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)

    with pytest.raises(ValueError, match=r"in the Net that 2 ranks train: advice"):
        register(net, adasum_state, 2, "advice")
    register(net, adasum_state, 1, "advice")
    with pytest.raises(ValueError, match=r"start a rank for each GPU with torchrun"):
        register(DataParallel(net), adasum_state, 1, "advice")
    plain = torch.optim.SGD(net.parameters())
    refuse_distributed_optimizer(plain)
    adasum.init()
    optimizer = adasum.DistributedOptimizer(plain, net.named_parameters())
    with pytest.raises(ValueError, match=r"pass the plain optimizer"):
        refuse_distributed_optimizer(optimizer)
    dist.destroy_process_group()


def check_lightning(rank: int, package: str) -> None:
    """Lightning accumulates, clips, trains one model twice, and saves nothing of the callback."""
    as_torchrun()
    pl, strategies = import_module(package), import_module(f"{package}.strategies")
    from adasum.integrations.lightning import HookCallback

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.wrap = Net(), None

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            plain = torch.optim.SGD(self.parameters(), lr=RATE)
            return self.wrap(plain) if self.wrap else plain

    class Unwrapped(strategies.DDPStrategy):
        def configure_ddp(self) -> None:
            """As a strategy that shards."""

    def fit(task: Any, callback: Any, strategy: Any = "ddp") -> Any:
        options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
        quiet = ("checkpointing", "model_summary", "progress_bar")
        options |= {"accumulate_grad_batches": PASSES, "gradient_clip_val": LIMIT}
        options |= {f"enable_{each}": False for each in quiet}
        trainer = pl.Trainer(strategy=strategy, callbacks=[callback], **options)
        trainer.fit(task, DataLoader(examples(4 * PASSES * BATCH), BATCH, shuffle=True))
        return trainer

    task, callback = Task(), HookCallback(state())
    fit(task, callback)
    trainer = fit(task, callback)
    compare(task.net, 4)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/{rank}.ckpt")
        if rank == 0:
            assert torch.load(f"{folder}/0.ckpt", weights_only=False)["callbacks"] == {}

    with pytest.raises(ValueError, match="the Task that 2 ranks train: Unwrapped reduces by its"):
        fit(task, callback, Unwrapped())
    adasum.init()
    task.wrap = adasum.DistributedOptimizer
    with pytest.raises(ValueError, match="pass the plain optimizer"):
        fit(task, callback)
    with pytest.raises(TypeError, match="must be a HookState, got AdasumReducer"):
        HookCallback(adasum.Adasum)


def check_accelerate(rank: int, _: str) -> None:
    """Accelerate accumulates and clips; what was not prepared, or has a hook, is an error."""
    as_torchrun()
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    from adasum.integrations.accelerate import register_hook

    accelerator, net = Accelerator(gradient_accumulation_steps=PASSES), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    loader = DataLoader(examples(4 * PASSES * BATCH), BATCH, shuffle=True)
    with pytest.raises(ValueError, match="the Net that 2 ranks train: pass the model that acc"):
        register_hook(accelerator, net, state())
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    register_hook(accelerator, model, state())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    compare(net, 2)

    with pytest.raises(TypeError, match="accelerator must be an Accelerator, got Distributed"):
        register_hook(model, accelerator, state())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn.Module, got Accelerated"):
        register_hook(accelerator, optimizer, state())
    with pytest.raises(TypeError, match="must be a HookState, got AdasumReducer"):
        register_hook(accelerator, model, adasum.Adasum)
    fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    other = Accelerator(kwargs_handlers=[fp16])
    with pytest.raises(RuntimeError, match="has another communication hook"):
        register_hook(other, other.prepare(Net()), state())
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="has another communication hook"):
        register_hook(accelerator, compiled, state())


def check_transformers(rank: int, _: str) -> None:
    """The Trainer accumulates, clips, and trains its model twice."""
    as_torchrun()
    from transformers import Trainer, TrainingArguments

    from adasum.integrations.transformers import HookCallback

    data = [{"x": x, "y": y} for x, y in examples(4 * PASSES * BATCH)]
    net = Net()

    def make(optimizer: torch.optim.Optimizer) -> Trainer:
        options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
        options |= {"logging_strategy": "no", "save_strategy": "no"}
        options |= {"lr_scheduler_type": "constant", "num_train_epochs": 1}
        options |= {"gradient_accumulation_steps": PASSES, "max_grad_norm": LIMIT}
        arguments = TrainingArguments(folder, per_device_train_batch_size=BATCH, **options)
        return Trainer(net, arguments, train_dataset=data, optimizers=(optimizer, None))

    with tempfile.TemporaryDirectory() as folder:
        plain = torch.optim.SGD(net.parameters(), lr=RATE)
        trainer = make(plain)
        trainer.add_callback(HookCallback(trainer, state()))
        trainer.train()
        trainer.train()
        compare(net, 4)

        other = make(torch.optim.SGD(net.parameters(), lr=RATE))
        other.add_callback(HookCallback(make(plain), state()))
        with pytest.raises(ValueError, match="the Net that 2 ranks train: DeepSpeed and FSDP"):
            other.train()
        adasum.init()
        wrapped = adasum.DistributedOptimizer(plain, net.named_parameters())
        other = make(wrapped)
        other.add_callback(HookCallback(other, state()))
        with pytest.raises(ValueError, match="pass the plain optimizer"):
            other.train()
        with pytest.raises(TypeError, match=r"trainer must be a transformers\.Trainer, got Net"):
            HookCallback(net, state())
        with pytest.raises(TypeError, match="must be a HookState, got AdasumReducer"):
            HookCallback(trainer, adasum.Adasum)
