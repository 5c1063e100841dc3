"""FSDP2 over replicas: torch's own HSDP, and adasum's hook over a one-dimensional mesh.

torch's wheel ships the helpers of its FSDP2 tests and not the tests themselves. These ask what
test_fully_shard_training.py asks of a mesh of replicas and shards: gradients are the average over
all ranks of those of a model that is not sharded, whatever of FSDP's switches is used. Without the
hook the model is sharded over the mesh of two dimensions, where FSDP reduces by itself.
"""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import adasum
from tests.torch_conformance import cpu_for_gpus

PASSES = 3
DIM = 10


class _Tied(nn.Module):
    """The weight of the first layer is that of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.middle = nn.Linear(DIM, DIM)
        self.last.weight = self.first.weight

    def layers(self) -> list[nn.Module]:
        """What may be units: a shared parameter has to be in the model's."""
        return [self.middle]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs).tanh()).tanh())


class _Twice(nn.Module):
    """One layer is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outer(self.inner(self.inner(inputs).tanh()).tanh())


def _helpers() -> Any:
    cpu_for_gpus.import_helpers()
    from torch.testing._internal import common_fsdp

    return common_fsdp


class FsdpTests(unittest.TestCase):
    """Each is run on every rank, with a default process group, of even size."""

    hook: bool
    rank: int

    def _shard(self, model: nn.Module, op: Any = adasum.Average, **options: Any) -> FSDPModule:
        """Shard every layer, and the model, over the mesh; replicas are two."""
        size = dist.get_world_size()
        names = ("replicate", "shard")
        mesh: DeviceMesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        options["mesh"] = mesh["shard"] if self.hook else mesh
        for child in getattr(model, "layers", model.children)():
            if any(True for _ in child.parameters()):
                fully_shard(child, **options)
        sharded = fully_shard(model, **options)
        if self.hook:
            state = adasum.HookState(op=op, process_group=mesh.get_group("replicate"))
            adasum.register_fsdp_hook(sharded, state)
        return sharded

    def _compare(
        self,
        model: nn.Module,
        prepare: Callable[[FSDPModule, int], None] = lambda *_: None,
        micro_batches: int = 1,
        **options: Any,
    ) -> None:
        """Compare the gradients of some passes with those of the model that is not sharded."""
        alone = copy.deepcopy(model)
        sharded = self._shard(model, **options)
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(PASSES):
            sharded.zero_grad()
            alone.zero_grad()
            for batch in range(micro_batches):
                prepare(sharded, batch)
                inputs = torch.randn(4, DIM, generator=generator)
                for each in (sharded, alone):
                    _loss(each(inputs)).backward()
            _require_average(sharded, alone)

    def test_train_parity(self) -> None:
        for reshard in (True, False):
            self._compare(_stack(), reshard_after_forward=reshard)

    def test_train_parity_single_group(self) -> None:
        torch.manual_seed(0)
        self._compare(nn.Linear(DIM, DIM))

    def test_train_parity_unused_module(self) -> None:
        torch.manual_seed(0)
        self._compare(_helpers().DoubleLinear(DIM, use_second_linear=False))

    def test_train_parity_two_outputs(self) -> None:
        torch.manual_seed(0)
        self._compare(_helpers().DoubleLinear(DIM))

    def test_train_parity_shared_parameters(self) -> None:
        torch.manual_seed(0)
        self._compare(_Tied())

    def test_train_parity_module_called_twice(self) -> None:
        torch.manual_seed(0)
        self._compare(_Twice())

    def test_train_parity_frozen_layer(self) -> None:
        model = _stack()
        model[1].requires_grad_(False)
        self._compare(model)

    def test_train_parity_frozen_weights_beside_others(self) -> None:
        model = _stack()
        for layer in model:
            layer.in_proj.weight.requires_grad_(False)
        self._compare(model)

    def test_train_parity_activation_checkpointing(self) -> None:
        model = _stack()
        for layer in model:
            checkpoint(layer)
        self._compare(model)

    def test_train_parity_complex_parameters(self) -> None:
        torch.manual_seed(0)

        class Spectral(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(DIM // 2 + 1, 7, dtype=torch.cfloat)

            def forward(self, inputs: Tensor) -> Tensor:
                return self.mix(torch.fft.rfft(inputs)).abs()

        self._compare(Spectral())

    def test_gradient_accumulation(self) -> None:
        def prepare(model: FSDPModule, batch: int) -> None:
            model.set_requires_gradient_sync(batch == 1)
            model.set_is_last_backward(batch == 1)

        self._compare(_stack(), prepare, micro_batches=2)

    def test_gradient_accumulation_in_shards(self) -> None:
        """Micro-batches are reduced within the shards, and the last one over the replicas too."""
        self._compare(_stack(), lambda model, batch: model.set_requires_all_reduce(batch == 1), 2)

    def test_gradient_accumulation_by_itself(self) -> None:
        """Every micro-batch is reduced, and FSDP adds up what comes out."""
        self._compare(_stack(), micro_batches=2)

    def test_mixed_precision(self) -> None:
        """Gradients of bfloat16 are reduced in float32, as HSDP does: to float32's rounding."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        model = _stack()
        alone = copy.deepcopy(model)
        sharded = self._shard(model, mp_policy=policy)
        inputs = torch.randn(4, DIM, generator=torch.Generator().manual_seed(self.rank))
        _loss(sharded(inputs)).backward()
        low = copy.deepcopy(alone).bfloat16()
        _loss(low(inputs.bfloat16())).backward()
        for parameter, of_low in zip(alone.parameters(), low.parameters(), strict=True):
            assert of_low.grad is not None
            parameter.grad = of_low.grad.float()
        _require_average(sharded, alone)

    def test_clip_grad_norm(self) -> None:
        alone = _stack()
        sharded = self._shard(copy.deepcopy(alone))
        inputs = torch.randn(4, DIM, generator=torch.Generator().manual_seed(self.rank))
        for each in (sharded, alone):
            _loss(each(inputs)).backward()
        _require_average(sharded, alone)
        total = nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        assert isinstance(total, DTensor)
        # A norm of some hundred squares, each rounded twice.
        torch.testing.assert_close(
            total.full_tensor(), expected, rtol=1000 * torch.finfo(total.dtype).eps, atol=0
        )

    def test_optimizer_step(self) -> None:
        """After a step of every kind of optimizer state a rank's shards are those of the model."""
        alone = _stack()
        sharded = self._shard(copy.deepcopy(alone))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, alone)]
        inputs = torch.randn(4, DIM, generator=torch.Generator().manual_seed(self.rank))
        for each in (sharded, alone):
            _loss(each(inputs)).backward()
        _require_average(sharded, alone)
        for optimizer in optimizers:
            optimizer.step()
        for got, expected in zip(sharded.parameters(), alone.parameters(), strict=True):
            largest = max(1.0, float(expected.detach().abs().max()))
            # The gradient's rounding, and that of the step.
            bound = torch.finfo(expected.dtype).eps * (dist.get_world_size() + 2) * largest
            torch.testing.assert_close(got.full_tensor(), expected, rtol=0, atol=bound)

    def test_adasum_of_equal_data(self) -> None:
        """Replicas with equal gradients have their average, which is Adasum of them too."""
        if not self.hook:
            self.skipTest("FSDP has no Adasum of its own")
        alone = _stack()
        sharded = self._shard(copy.deepcopy(alone), adasum.Adasum)
        inputs = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
        for each in (sharded, alone):
            _loss(each(inputs)).backward()
        _require_average(sharded, alone)

    def test_adasum_of_gradients_accumulated_in_shards(self) -> None:
        """Replicas whose micro-batches are the same in another order have equal sums of them."""
        if not self.hook:
            self.skipTest("FSDP has no Adasum of its own")
        alone = _stack()
        sharded = self._shard(copy.deepcopy(alone), adasum.Adasum)
        inputs = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(0))
        in_second_replica = self.rank >= dist.get_world_size() // 2
        for batch in (0, 1):
            sharded.set_requires_all_reduce(batch == 1)
            for each in (sharded, alone):
                _loss(each(inputs[batch ^ in_second_replica])).backward()
        _require_average(sharded, alone)


def _stack() -> Any:
    torch.manual_seed(0)
    return _helpers().MLPStack(DIM)


def _loss(output: Tensor | Sequence[Tensor]) -> Tensor:
    outputs = (output,) if isinstance(output, Tensor) else output
    return torch.stack([each.square().mean() for each in outputs]).sum()


def _require_average(sharded: Any, alone: nn.Module) -> None:
    """Replace the gradients of `alone` by their average over all ranks, and compare; collective."""
    size = dist.get_world_size()
    for (name, got), expected in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        if not expected.requires_grad:
            assert got.grad is None, name
            continue
        gradient = torch.zeros_like(expected) if expected.grad is None else expected.grad
        largest = gradient.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(gradient)
        expected.grad = gradient / size
        mine = torch.zeros_like(expected) if got.grad is None else got.grad.full_tensor()
        # Every rank rounds in adding its gradient, and twice more in dividing.
        bound = torch.finfo(expected.dtype).eps * (size + 2) * float(largest)
        worst = float((mine - expected.grad).abs().max())
        assert worst <= bound, f"{name} is off by {worst:.1e}, and rounding is {bound:.1e}"
