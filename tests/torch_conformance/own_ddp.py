"""Tests of DDP that torch's wheel does not ship, for what has gone wrong here: run as torch's own.

torch's test_c10d_gloo.py, which is not in the wheel, has DDP with complex parameters. No test of
torch looks at what a step under a dispatch mode leaves behind for the next one.
"""

from __future__ import annotations

import copy
import unittest
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import adasum


class _Spectral(nn.Module):
    """Real and complex weights, more of either than a bucket of 1 KiB holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.weights = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
        self.mix = nn.Linear(9, 9, dtype=torch.cfloat)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mix(torch.fft.rfft(self.first(inputs)) * self.weights).abs()


class _Refusing(TorchDispatchMode):
    """Raises when one of some operators is called, as a test that forbids them does."""

    def __init__(self, *operators: str) -> None:
        super().__init__()
        self._operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in self._operators:
            raise RuntimeError(f"{func} is refused")
        return func(*args, **(kwargs or {}))


class DdpTests(unittest.TestCase):
    """Each is run on every rank, with a default process group."""

    rank: int

    def _train(self, model: nn.Module, **options: Any) -> None:
        """Compare three steps' gradients with the ranks' average, by torch.distributed."""
        alone = copy.deepcopy(model)
        together = DistributedDataParallel(model, **options)
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(3):
            inputs = torch.randn(4, 16, generator=generator)
            for each in (together, alone):
                each.zero_grad()
                each(inputs).square().mean().backward()
            for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
                assert got.grad is not None
                assert expected.grad is not None
                largest = expected.grad.abs().max()
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                dist.all_reduce(expected.grad)
                expected.grad /= dist.get_world_size()
                # Every rank rounds once in adding its gradient, and once more in dividing.
                rounding = torch.finfo(got.dtype).eps * (dist.get_world_size() + 1)
                torch.testing.assert_close(
                    got.grad, expected.grad, rtol=0, atol=rounding * float(largest)
                )

    def test_ddp_complex_params(self) -> None:
        torch.manual_seed(0)
        for in_bucket in (False, True):
            self._train(_Spectral(), bucket_cap_mb=0.001, gradient_as_bucket_view=in_bucket)

    def test_ddp_complex_params_static_graph(self) -> None:
        torch.manual_seed(0)
        self._train(_Spectral(), static_graph=True)

    def test_ddp_after_a_step_under_a_mode(self) -> None:
        each = ("clone", "add", "div", "maximum", "copy_", "empty")
        # All but the memory for a trial come first: what is known already is not tried again.
        for operators in (each[:-1], *((operator,) for operator in each)):
            torch.manual_seed(0)
            # A group of its own: after an error in the middle of a step another one is needed.
            group = dist.new_group()
            model = DistributedDataParallel(nn.Linear(16, 2), process_group=group)
            # They may fail, on all ranks alike: what is asked is what comes after.
            with suppress(RuntimeError, TypeError), _Refusing(*operators):
                adasum.Average.check(torch.float32)
            with suppress(RuntimeError, TypeError), _Refusing(*operators):
                model(torch.ones(3, 16)).sum().backward()
            dist.barrier()
            self._train(nn.Linear(16, 2), process_group=dist.new_group())

    def test_ddp_under_a_mode_that_counts(self) -> None:
        # What a FlopCounterMode, a profiler's or a debugger's mode does: it looks on.
        torch.manual_seed(0)
        counting = FlopCounterMode(display=False)
        for mode in (counting, nullcontext()):
            with mode:
                self._train(nn.Linear(16, 2))
        assert counting.get_total_flops() > 0
