"""Complex parameters under DistributedDataParallel and FSDP2, against pairs of reals."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from adasum.fsdp import register_fsdp_hook
from tests.adasum.ddp_cases import Recorder
from tests.adasum.ddp_model import HUGE, OPS, STEPS, TINY, columns_of, compare, wrap
from tests.adasum.fsdp_model import Ranks


class Fourier(nn.Module):
    """Weights on frequencies, two dtypes of them, and real ones.

    reals: whether the complex parameters are pairs of reals, of the same values.
    """

    def __init__(self, *, reals: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        numbers: list[Tensor] = [
            torch.randn(shape, generator=generator, dtype=dtype)
            for shape, dtype in (
                ((5,), torch.complex64),
                ((3, 5), torch.complex64),
                ((), torch.complex64),
                ((2, 3), torch.complex128),
                ((130, 129), torch.complex64),
            )
        ]
        self.weights = nn.ParameterList(torch.view_as_real(n) if reals else n for n in numbers)
        self.last = nn.Linear(8, 3)
        with torch.no_grad():
            for parameter in self.last.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = (
            weight if weight.is_complex() else torch.view_as_complex(weight)
            for weight in self.weights
        )
        spectrum = torch.fft.rfft(x) * a * c + b.sum(0) * d.sum()
        return self.last(torch.fft.irfft(spectrum, n=8)) + (e * e.conj()).real.sum() * x.sum()


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(4, 8, generator=generator)).square().mean()


def _real_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        grad = parameter.grad
        found.append((torch.view_as_real(grad) if grad.is_complex() else grad).clone())
    return found


def check_complex(rank: int) -> None:
    """With "rd" the bits are those of the same parameters as pairs of reals; else to rounding."""
    layouts: list[dict[str, Any]] = [
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": HUGE, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ]
    backward = lambda m, r: _loss(m, r, 0).backward()  # noqa: E731
    columns = columns_of(Fourier(reals=True), 0, backward)
    for op in OPS:
        for layout in layouts:
            for algorithm in ("rd", None):
                answers = []
                for reals in (False, True):
                    wrapped = wrap(Fourier(reals=reals), op, algorithm=algorithm, **layout)
                    for _ in range(2):
                        wrapped.zero_grad()
                        backward(wrapped, rank)
                        answers.append(_real_gradients(wrapped))
                        compare(answers[-1], op, columns, torch.float32)
                if algorithm == "rd":
                    for other in answers[1:]:
                        assert all(map(torch.equal, answers[0], other)), (op, layout)


def check_complex_observer(rank: int) -> None:
    """An observer sees complex gradients, each its own; pairs where they are compressed."""
    for wrapper in (None, default_hooks.fp16_compress_wrapper):
        model = Fourier(reals=False)
        alone = copy.deepcopy(model)
        _loss(alone, rank, 0).backward()
        wrapped = DistributedDataParallel(model)
        observer = Recorder()
        state = HookState(
            op=hvd.Adasum, observer=observer, named_parameters=model.named_parameters()
        )
        hook = ddp_hook if wrapper is None else wrapper(ddp_hook)
        wrapped.register_comm_hook(state, hook)
        _loss(wrapped, rank, 0).backward()
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            seen, own = observer.before[name], parameter.grad
            if wrapper is not None and own.is_complex():
                own = torch.view_as_real(own)
            assert torch.equal(seen, own.to(seen.dtype)), name
        if wrapper is None:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(observer.after[name], parameter.grad), name


class _Whole(nn.Module):
    """Complex weights that are a unit of their own, for FSDP takes one dtype a unit."""

    def __init__(self, *, reals: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        numbers = [torch.randn(5, 3, generator=generator, dtype=torch.complex64) for _ in range(2)]
        self.weights = nn.ParameterList(torch.view_as_real(n) if reals else n for n in numbers)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (w if w.is_complex() else torch.view_as_complex(w) for w in self.weights)
        return (torch.complex(x[:, :5], x[:, 3:]) @ a * b.sum(0)).abs()


def check_fsdp_complex(ranks: Ranks) -> None:
    """Units of complex parameters: the bits of the same as pairs of reals."""
    for op, algorithm in (("Sum", None), ("Average", None), ("Adasum", "vhdd"), ("Adasum", None)):
        answers = []
        for reals in (False, True):
            model = nn.Sequential(_Whole(reals=reals), nn.Linear(3, 2))
            with torch.no_grad():
                for parameter in model[1].parameters():
                    parameter.fill_(0.25)
            fully_shard(model[0], mesh=ranks.mesh["shard"])
            fully_shard(model[1], mesh=ranks.mesh["shard"])
            state = ranks.state(op, algorithm)
            for part in model:
                register_fsdp_hook(part, state)
            for step in range(STEPS):
                for parameter in model.parameters():
                    parameter.grad = None
                _loss(model, ranks.rank, step).backward()
            locals_ = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
            answers.append([torch.view_as_real(g) if g.is_complex() else g for g in locals_])
        assert all(map(torch.equal, *answers)), (op, algorithm)
