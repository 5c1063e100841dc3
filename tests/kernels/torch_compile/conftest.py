"""A compiler that remembers nothing of the test before, and the devices to compile for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.conftest import ON_GPU


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    if not torch._dynamo.is_dynamo_supported():
        pytest.skip("torch.compile does not know this Python")
    torch._dynamo.reset()
    # Compiled graphs on disk know an operator by its name: an older checkout's must not be found.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"
