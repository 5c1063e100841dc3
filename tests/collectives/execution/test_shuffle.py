"""Parameter-server shuffles: which rank gathers what, and which range a tensor falls in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import CollectiveMismatchError, Group, run_threads

# A multiple of 64 bytes, so that packing needs no padding.
NUMEL = 25_008
BYTES = 4 * NUMEL


def received(size: int, job: Callable[[Group], Any]) -> list[int]:
    """Run `job`; return the bytes that each rank gathers: those of a shuffle's first step."""

    def main(group: Group) -> int:
        count = 0
        exchange = group.transport.exchange

        def noted(sends: Any, recvs: Any, step: str, *rest: Any) -> None:
            nonlocal count
            if step.startswith("step 0 (ps"):
                count += sum(message.tensor.nbytes for message in recvs)
            exchange(sends, recvs, step, *rest)

        group.transport.exchange = noted  # type: ignore[method-assign]
        job(group)
        return count

    return run_threads(size, main)


def eight(group: Group) -> list[torch.Tensor]:
    return [torch.full((NUMEL,), 1.0 + group.rank + i) for i in range(8)]


@pytest.mark.parametrize("name", ["pscpu", "psgpu"])
def test_shards_of_a_grouped_call_are_dealt_to_all_ranks(name: str) -> None:
    """Eight tensors of 100 kB at 4 ranks: each rank gathers two of them from three others."""

    def job(group: Group) -> None:
        for i, each in enumerate(group.grouped_all_reduce(eight(group), algorithm=name)):
            assert each.eq(10.0 + 4 * i).all()

    assert received(4, job) == [2 * 3 * BYTES] * 4


def test_packed_that_differs_between_ranks_is_a_mismatch_and_other_values_are_refused() -> None:
    def main(group: Group) -> None:
        tensors = [torch.ones(3), torch.ones(4)]
        with pytest.raises(CollectiveMismatchError, match=r"packed=False.*packed=True"):
            group.grouped_all_reduce(tensors, packed=group.rank == 1)
        with pytest.raises(TypeError, match="packed must be a bool"):
            group.grouped_all_reduce(tensors, packed=1)  # type: ignore[arg-type]
        assert group.all_reduce(torch.ones(1)).item() == 2.0  # type: ignore[union-attr]

    run_threads(2, main)
