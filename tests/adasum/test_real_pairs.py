"""Complex tensors, which Adasum takes as pairs of reals. Ranks are threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from collectives import calls
from tests.adasum.definition import relative_error, tolerance, tree

DTYPES = [torch.complex32, torch.complex64, torch.complex128]
# Cut into 2, 4 or 8 pieces it is cut where its reals are, and some cuts fall inside segments.
BOUNDS = (0, 1, 1, 130, 900, 1008)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _vector(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator, dtype=torch.complex128)
    # A part in common: coefficients matter.
    return (values + torch.linspace(1, 2, values.numel()).view(values.shape) * 1j).to(dtype)


def _both(size: int, algorithm: str, shape: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Reduce each rank's vector, and its reals by segments twice as long."""
    bounds = None if shape != BOUNDS[-1] else BOUNDS
    doubled = None if bounds is None else tuple(2 * bound for bound in bounds)

    def run(group: collectives.Group) -> tuple[Tensor, Tensor]:
        mine = _vector(group.rank, shape, dtype)
        reals = torch.view_as_real(mine.clone())
        group.all_reduce(mine, hvd.Adasum, algorithm=algorithm, segments=bounds)
        group.all_reduce(reals, hvd.Adasum, algorithm=algorithm, segments=doubled)
        return torch.view_as_real(mine), reals

    return collectives.run_threads(size, run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["vhdd", "rd", "xring", "pscpu", "bruck", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "messages"])
def test_adasum_of_complex_vectors_has_the_bits_of_their_reals(
    size: int, algorithm: str, dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)
    vectors = [torch.view_as_real(_vector(rank, BOUNDS[-1], dtype)) for rank in range(size)]
    want = tree([vector.reshape(-1) for vector in vectors], [2 * bound for bound in BOUNDS])
    results = _both(size, algorithm, BOUNDS[-1], dtype)
    for mine, reals in results:
        assert torch.equal(mine, reals)
        assert torch.equal(mine, results[0][0])
    if algorithm in ("vhdd", "rd", "auto"):
        assert relative_error(results[0][0].reshape(-1), want) <= tolerance(vectors[0].dtype)


@pytest.mark.parametrize("shape", [0, 1, 5, 40_000])
def test_adasum_of_complex_vectors_of_any_length_equals_the_definition(shape: int) -> None:
    for size in (2, 3, 4):
        vectors = [torch.view_as_real(_vector(r, shape, torch.complex64)) for r in range(size)]
        want = tree([vector.reshape(-1) for vector in vectors])
        for mine, _ in _both(size, "auto", shape, torch.complex64):
            assert relative_error(mine.reshape(-1), want) <= tolerance(torch.float32)


def test_allreduce_of_a_complex_tensor_lets_gradients_flow() -> None:
    def run(group: collectives.Group) -> bool:
        given = _vector(group.rank, 5, torch.complex64).requires_grad_()
        hvd.allreduce(given, op=hvd.Adasum).abs().sum().backward()
        assert given.grad is not None
        return given.grad.is_complex()

    assert all(collectives.run_threads(2, run))
