"""The sweep over every kernel, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import sweep

SMALL = (1, 1003, 2051)
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", sweep.KERNELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_each_kernel_is_its_float64_reference(device: str, name: str) -> None:
    sweep.KERNELS[name](device, SMALL if device == "cpu" else sweep.SIZES)
