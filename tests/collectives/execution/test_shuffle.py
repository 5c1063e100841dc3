"""Parameter-server shuffles: which rank gathers which tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import Group, run_threads

# A multiple of 64 bytes, so that packing needs no padding.
NUMEL = 25_008


@pytest.mark.parametrize("name", ["pscpu", "psgpu"])
def test_shards_of_a_grouped_call_are_dealt_to_all_ranks(name: str) -> None:
    """Eight tensors of 100 kB at 4 ranks: each rank gathers two of them from three others."""

    def main(group: Group) -> int:
        gathered = 0
        exchange = group.transport.exchange

        def noted(sends: Any, recvs: Any, step: str, timeout: float) -> None:
            nonlocal gathered
            if step.startswith("step 0 (ps"):
                gathered += sum(message.tensor.nbytes for message in recvs)
            exchange(sends, recvs, step, timeout)

        group.transport.exchange = noted  # type: ignore[method-assign]
        tensors = [torch.full((NUMEL,), 1.0 + group.rank + i) for i in range(8)]
        for i, each in enumerate(group.grouped_all_reduce(tensors, algorithm=name)):
            assert each.eq(10.0 + 4 * i).all()
        return gathered

    assert run_threads(4, main) == [2 * 3 * 4 * NUMEL] * 4
