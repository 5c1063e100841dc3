"""Every kernel in a CUDA graph: replays give the bits of a plain call on what the inputs then hold.

Also where the tables of addresses are first made while the graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import bits, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"),
]

NUMEL = 50_000
CUTS = (0, 10, 40_001, NUMEL)


def unpacked(a: Tensor, b: Tensor) -> list[Tensor]:
    return kernels.unpack(kernels.pack([a, b]), [torch.empty_like(a), torch.empty_like(b)])


def combined(a: Tensor, b: Tensor) -> Tensor:
    return kernels.combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS)


def blended(a: Tensor, b: Tensor) -> Tensor:
    """All launches of Adasum by a Gram matrix: nothing comes back to the host."""
    vectors, tree = [a, b, a - b], [(0, 1, 1, 1), (0, 2, 2, 1)]
    matrices = kernels.gram(vectors, CUTS, precise=True)
    factors = kernels.adasum_coefficients(matrices[None], tree)
    return kernels.weighted_sum(vectors, factors, CUTS)


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pack, unpack": unpacked,
    "sum_n": lambda a, b: kernels.sum_n([a, b, a], scale=0.3),
    "scaled_add": lambda a, b: kernels.scaled_add(a, b, alpha=0.3),
    "dot_and_norms, combine": combined,
    "gram, adasum_coefficients, weighted_sum": blended,
    "adasum in one launch": kernels.adasum,
    "adasum of segments": lambda a, b: kernels.adasum(a, b, CUTS),
    "adasum in two": lambda a, b: kernels.adasum(a, b, CUTS, cooperative=False),
}


def flat(value: Tensor | Sequence[Tensor]) -> list[bytes]:
    return [bits(tensor) for tensor in ([value] if isinstance(value, Tensor) else value)]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_replays_give_the_bits_of_a_plain_call(name, warm):
    call = CALLS[name]
    # Compiling is no work for a capture: the same call on other memory.
    call(*(random(NUMEL, torch.float32, "cuda", seed) for seed in (1, 2)))
    a, b = (random(NUMEL, torch.float32, "cuda", seed) for seed in (3, 4))
    if warm:
        call(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(a, b)
    for seed in (5, 7, 9):
        a.copy_(random(NUMEL, torch.float32, "cuda", seed))
        b.copy_(random(NUMEL, torch.float32, "cuda", seed + 1))
        expected = flat(call(a, b))
        graph.replay()
        assert flat(result) == expected
