"""join: ranks with more data train on while the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import adasum as hvd
from collectives import CollectiveMismatchError, Group, run_threads
from collectives.reducers import SumReducer
from tests.adasum.definition import (
    flat,
    make_model,
    relative_error,
    tolerance,
    trajectory,
    trajectory_tolerance,
    tree,
)
from tests.adasum.jobs import OPS, on_ranks, take_steps, wrapped


def vector(rank: int, step: int, length: int = 50) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64)


def near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to rounding: of sums of a few terms, and Adasum's few operations a level."""
    scale = wanted.abs().max().item() + 1.0
    assert (actual - wanted).abs().max().item() <= tolerance(torch.float64) * scale


def uneven(rank: int, size: int, steps: Sequence[int]) -> int:
    """Rank r makes steps[r] rounds of every function, then joins; who is last is returned."""
    for step in range(steps[rank]):
        live = [r for r in range(size) if steps[r] > step]
        terms = [vector(r, step) if r in live else torch.zeros(50).double() for r in range(size)]
        mine, total = terms[rank], sum(terms)
        near(hvd.allreduce(mine, op=hvd.Sum, name="sum"), total)
        near(hvd.allreduce(mine, prescale_factor=2.0), 2.0 * total / size)
        near(hvd.allreduce(mine, op=hvd.Adasum), tree(terms))
        pieces = list(mine.clone().split([7, 13, 30]))
        grouped = hvd.grouped_allreduce(pieces, op=hvd.Adasum, name="pieces")
        near(torch.cat(grouped), tree(terms, (0, 7, 20, 50)))
        works = [hvd.allreduce_async(mine, op=hvd.Sum, name=f"w{i}") for i in range(3)]
        hvd.barrier()
        gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
        assert gathered[:, 0].tolist() == [r for r in live for _ in range(r + 1)]
        assert hvd.broadcast(torch.tensor([rank]), live[-1]).item() == live[-1]
        assert hvd.broadcast_object({"of": rank}, live[0]) == {"of": live[0]}
        assert hvd.allgather_object(rank) == live
        for work in works:
            near(hvd.synchronize(work), total)
    last = hvd.join()
    # The ranks are in step again, and may join again.
    near(hvd.allreduce(vector(rank, 99), op=hvd.Sum), sum(vector(r, 99) for r in range(size)))
    assert hvd.join() == size - 1
    return last


@pytest.mark.parametrize(
    ("steps", "last"),
    [([2], 0), ([1, 3], 1), ([2, 0], 0), ([3, 1, 2], 0), ([1, 1, 1], 2), ([0, 2, 1, 2], 3)],
)
def test_uneven_steps_on_threads_average_over_all_ranks(steps: list[int], last: int) -> None:
    size = len(steps)
    assert run_threads(size, lambda group: uneven(group.rank, size, steps)) == [last] * size


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("Sum", {}),
        ("Average", {"groups": 2}),
        ("Adasum", {}),
        ("Adasum", {"method": "gradient"}),
        ("Adasum", {"step_in_backward": True}),
        ("Adasum", {"algorithm": "xring"}),
    ],
)
def test_optimizer_with_joined_ranks_steps_by_zeros_for_them(
    op: str, options: dict[str, Any]
) -> None:
    ends = [2, 4, 1]

    def run(group: Group) -> torch.Tensor:
        model = make_model()
        optimizer = wrapped(model, "momentum", op=OPS[op], **options)
        take_steps(model, optimizer, ends[group.rank])
        # The last one's model for all.
        assert hvd.join() == 1
        hvd.broadcast_parameters(model.state_dict(), 1)
        return flat(model)

    method = options.get("method", "delta")
    want = trajectory(op, "momentum", 3, 1, 4, method=method, ends=ends)[-1]
    for got in run_threads(3, run):
        assert relative_error(got, want) <= trajectory_tolerance(4)


def test_state_with_joined_ranks_is_broadcast_to_the_others() -> None:
    def run(group: Group) -> float | None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0, momentum=0.5), op=hvd.Adasum
        )
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 2.0 + group.rank)
        if group.rank == 0:
            hvd.join()
            return None
        hvd.broadcast_optimizer_state(optimizer, root_rank=2)
        hvd.join()
        return float(optimizer.state[parameter]["momentum_buffer"][0])

    assert run_threads(3, run) == [None, 4.0, 4.0]


def test_calls_that_need_a_joined_rank_raise_everywhere() -> None:
    """And after each the joined rank may join again."""

    def run(group: Group) -> list[str]:
        texts = []

        def fails(*words: str, call: Any) -> None:
            with pytest.raises(CollectiveMismatchError) as caught:
                hvd.join() if group.rank == 1 else call()
            texts.append(str(caught.value))
            assert all(word in texts[-1] for word in words), texts[-1]

        ones = torch.ones(3 + group.rank)
        fails("rank 0", "(3,)", "rank 2", "(5,)", call=lambda: hvd.allreduce(ones, name="x"))
        fails(
            "broadcast(b) needs rank 1 while rank 1 has joined",
            call=lambda: hvd.broadcast(torch.ones(2), 1, name="b"),
        )
        fails("needs rank 1", call=lambda: group.reduce(torch.ones(2), 1))
        fails("cannot be called", call=lambda: group.reduce_to_owners([torch.ones(2)]))
        fails("cannot be called", call=lambda: group.split([0, 2]))

        def unknown() -> Any:
            class Other(SumReducer):
                name = "Other"

            return group.all_reduce(torch.ones(2), Other())

        fails("needs op Other", call=unknown)
        assert hvd.join() == 2
        return texts

    first, *others = run_threads(3, run)
    assert all(other == first for other in others)


@on_ranks(2, timeout=1.0)
def test_rank_that_dies_ends_a_join(group: Group) -> None:
    if group.rank == 0:
        with pytest.raises(hvd.CollectiveTimeoutError, match="rank 1"):
            hvd.join()
        with pytest.raises(hvd.TransportError, match="unusable"):
            hvd.join()
