"""Complex tensors, which Adasum takes as pairs of reals. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adasum as hvd
import collectives
from adasum.orthogonality import orthogonality
from adasum.real_pairs import real_operands
from collectives import Operands
from collectives.reducers import Piece
from tests.adasum.definition import tolerance
from tests.adasum.jobs import on_ranks

DTYPES = [torch.complex32, torch.complex64, torch.complex128]
# Cut into 2, 4 or 8 pieces it is cut where its reals are, and some cuts fall inside segments.
BOUNDS = (0, 1, 1, 130, 900, 1008)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _vector(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.complex128)
    # A part in common: coefficients matter.
    return (values + torch.linspace(1, 2, numel) * 1j).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "algorithm"), [(2, "rd"), (4, "vhdd"), (7, "xring")])
@pytest.mark.usefixtures("by_messages")
def test_adasum_of_complex_vectors_has_the_bits_of_their_reals(
    size: int, algorithm: str, dtype: torch.dtype
) -> None:
    """Segments of reals are twice as long; the frozen table has the other algorithms."""

    def run(group: collectives.Group) -> None:
        mine = _vector(group.rank, BOUNDS[-1], dtype)
        reals = torch.view_as_real(mine.clone())
        group.all_reduce(mine, hvd.Adasum, algorithm=algorithm, segments=BOUNDS)
        doubled = tuple(2 * bound for bound in BOUNDS)
        group.all_reduce(reals, hvd.Adasum, algorithm=algorithm, segments=doubled)
        assert torch.equal(torch.view_as_real(mine), reals)

    collectives.run_threads(size, run)


def test_allreduce_of_a_complex_tensor_lets_gradients_flow() -> None:
    def run(group: collectives.Group) -> bool:
        given = _vector(group.rank, 5, torch.complex64).requires_grad_()
        hvd.allreduce(given, op=hvd.Adasum).abs().sum().backward()
        assert given.grad is not None
        return given.grad.is_complex()

    assert all(collectives.run_threads(2, run))


@on_ranks(2)
def test_orthogonality_of_complex_tensors_is_that_of_their_reals(group: collectives.Group) -> None:
    given = [_vector(group.rank, 30, dtype) for dtype in DTYPES]
    reals = [torch.view_as_real(tensor) for tensor in given]
    assert torch.equal(orthogonality(given), orthogonality(reals))
    conjugate = [tensor.conj() for tensor in given]
    assert orthogonality(conjugate).tolist() == pytest.approx(
        orthogonality(reals).tolist(), rel=2 * tolerance(torch.float16)
    )


def test_operands_of_complex_pieces_are_read_one_by_one() -> None:
    """A piece that is still arriving is not waited for before its turn."""
    taken: list[int] = []

    class Arriving(list[Piece]):
        def __getitem__(self, index: Any) -> Any:
            taken.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            return (self[index] for index in range(len(self)))

    parts = [_vector(rank, 4, torch.complex64) for rank in range(2)]
    pieces = Arriving(Piece((parts[0], parts[1]), parts[0], start) for start in (0, 4, 8))
    real = real_operands(Operands(pieces, 12, (0, 5, 12), None))
    assert (real.numel, real.segments) == (24, [0, 10, 24])
    iterator = iter(real.pieces)
    assert next(iterator).start == 0
    assert next(iterator).start == 8
    assert max(taken) == 1
    assert len(real.pieces) == 3
    assert [piece.start for piece in real.pieces[1:]] == [8, 16]
    assert real.pieces[2].out.data_ptr() == parts[0].data_ptr()
