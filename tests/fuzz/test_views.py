"""Views whose memory does not hold their values, and tensors that have none of their own."""

from __future__ import annotations

import pytest
import torch

import adasum
import kernels
from collectives import Group, run_threads

CONJUGATE = (torch.ones(3, dtype=torch.complex64) * 1j).conj()


def test_memory_that_does_not_hold_the_values() -> None:
    """Bytes travel: a view with a conjugate or negative bit would arrive with another value."""

    def run(group: Group) -> list[complex]:
        with pytest.raises(ValueError, match=r"resolve_conj\(\)\.resolve_neg\(\)"):
            group.all_reduce(CONJUGATE)
        with pytest.raises(ValueError, match=r"resolve_conj\(\)\.resolve_neg\(\)"):
            group.all_gather(CONJUGATE)
        return adasum.allgather(CONJUGATE).tolist()

    assert run_threads(2, run) == [[-1j] * 6] * 2
    negative = (torch.ones(1, dtype=torch.complex64) * 1j).conj().imag
    assert negative.is_contiguous() and negative.is_neg()
    with pytest.raises(ValueError, match=r"a is a negative view: pass a\.resolve_neg\(\)"):
        kernels.adasum(negative, torch.ones(1))


def test_nested_and_uninitialised_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    lazy = torch.nn.LazyLinear(3).weight

    def run(group: Group) -> None:
        with pytest.raises(ValueError, match="must not be nested"):
            group.all_reduce(nested)
        with pytest.raises(ValueError, match="uninitialised parameter: call its module"):
            adasum.allgather(lazy)

    run_threads(2, run)
    with pytest.raises(ValueError, match="a is a nested tensor"):
        kernels.adasum(nested, nested)
