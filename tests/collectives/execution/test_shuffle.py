"""Parameter-server shuffles: which rank gathers what, and which range a tensor falls in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from adasum import Adasum, HookState
from collectives import Average, CollectiveMismatchError, Group, Reducer, Sum, run_threads
from collectives.cost import ASSUMED, estimate
from collectives.schedules.topology import Topology
from tests.collectives.consistency.ranks import everywhere, run, start_and_wait

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


@pytest.mark.parametrize(("tensors", "shards", "gathering"), [(1, 1, 1), (1, 3, 3), (3, 1, 3)])
def test_fewer_shards_than_ranks_go_to_as_many_ranks(
    tensors: int, shards: int, gathering: int
) -> None:
    def job(group: Group) -> None:
        group.grouped_all_reduce(eight(group)[:tensors], algorithm=f"pscpu#{shards}")

    loads = received(4, job)
    assert sum(load > 0 for load in loads) == gathering
    # Pieces differ by one element, and slots are padded to 64 bytes.
    assert max(loads) - min(load for load in loads if load) <= 3 * (64 * tensors + 4)


def test_calls_of_one_shard_each_go_to_each_rank_in_turn() -> None:
    """Calls, a request's starts and the buckets that a hook starts, each of one tensor."""

    def calls(group: Group) -> None:
        for each in eight(group):
            group.all_reduce(each, algorithm="psgpu")

    def request(group: Group) -> None:
        made = group.all_reduce_init(torch.ones(NUMEL), algorithm="psgpu")
        for _ in range(8):
            made.start()
            made.wait()

    def hook(group: Group) -> None:
        state = HookState(Average, "psgpu", group)
        started = [
            state.start(each, f"bucket {i}", [0, NUMEL]) for i, each in enumerate(eight(group))
        ]
        for each in started:
            each.wait()

    for job in (calls, request, hook):
        assert received(4, job) == [2 * 3 * BYTES] * 4


def test_tensors_of_a_hooks_bucket_are_dealt_to_all_ranks() -> None:
    def job(group: Group) -> None:
        state = HookState(Sum, "psgpu", group)
        bucket = torch.cat(eight(group))
        state.start(bucket, "bucket", [i * NUMEL for i in range(9)]).wait()

    assert received(4, job) == [2 * 3 * BYTES] * 4


@pytest.mark.parametrize("algorithm", ["pscpu/xring", "xring/psgpu", "pscpu/pscpu"])
@pytest.mark.parametrize("op", [Sum, Adasum], ids=str)
def test_two_levels_with_dealt_shards_reduce_alike_on_all_ranks(
    algorithm: str, op: Reducer
) -> None:
    def main(group: Group) -> list[torch.Tensor]:
        group.topology = group._runner.topology = Topology(4, 2)
        generator = torch.Generator().manual_seed(group.rank)
        last: list[torch.Tensor] = []
        for _ in range(5):
            tensors = [torch.randn(n, generator=generator) for n in (7, 0, 300, 41)]
            last = group.grouped_all_reduce(tensors, op, algorithm=algorithm)  # type: ignore[assignment]
        return last

    answers = run_threads(4, main)
    for answer in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answer, answers[0], strict=True))


def test_ranges_of_a_grouped_call_go_by_each_tensors_elements() -> None:
    """Small tensors by the small range's algorithm, however many there are; packed ones as one."""

    def steps_of(packed: bool, numels: Sequence[int]) -> set[str]:
        found: set[str] = set()

        def main(group: Group) -> None:
            exchange = group.transport.exchange

            def noted(sends: Any, recvs: Any, step: str, *rest: Any) -> None:
                found.update(name for name in ("(pscpu)", "(xring)", "(rd)") if name in step)
                exchange(sends, recvs, step, *rest)

            group.transport.exchange = noted  # type: ignore[method-assign]
            tensors = [torch.full((n,), 1.0 + group.rank) for n in numels]
            group.grouped_all_reduce(tensors, algorithm="pscpu:100:xring", packed=packed)
            assert all(tensor.eq(6.0).all() for tensor in tensors)

        run_threads(3, main)
        return found

    assert steps_of(False, [60, 100, 50]) == {"(pscpu)"}
    assert steps_of(False, [60, 101, 50]) == {"(pscpu)", "(xring)"}
    assert steps_of(True, [60, 100, 50]) == {"(xring)"}
    assert steps_of(True, [30, 40, 30]) == {"(pscpu)"}


def test_packed_that_differs_between_ranks_is_a_mismatch_and_other_values_are_refused() -> None:
    def main(group: Group) -> None:
        tensors = [torch.ones(3), torch.ones(4)]
        with pytest.raises(CollectiveMismatchError, match=r"packed=False.*packed=True"):
            group.grouped_all_reduce(tensors, packed=group.rank == 1)
        with pytest.raises(TypeError, match="packed must be a bool"):
            group.grouped_all_reduce(tensors, packed=1)  # type: ignore[arg-type]
        assert group.all_reduce(torch.ones(1)).item() == 2.0  # type: ignore[union-attr]

    run_threads(2, main)


def test_cost_model_prices_dealt_shards_by_how_many_tensors_there_are() -> None:
    """What the busiest rank receives and sends, as the messages of a call have it."""
    topology = Topology(4, 4)
    one, eight_tensors = (
        estimate("pscpu", 8 * BYTES, ASSUMED, topology, segments=n) for n in (1, 8)
    )
    assert one.busiest_intra == 3 * 8 * BYTES
    # Three quarters of the buffer to the other gather ranks, and a quarter's sums to three.
    assert eight_tensors.busiest_intra == (3 / 4 + 3 / 4) * 8 * BYTES
    assert eight_tensors.memory == 3 * 2 * BYTES
    assert eight_tensors.seconds < one.seconds
    assert estimate("xring", 8 * BYTES, ASSUMED, topology, segments=8) == estimate(
        "xring", 8 * BYTES, ASSUMED, topology
    )


@everywhere
def test_gather_ranks_agree_after_mismatches_and_with_a_rank_that_has_joined(way: str) -> None:
    """Ranks that did not would wait for each other."""

    def job(group: Group) -> None:
        request = group.all_reduce_init(torch.ones(5), algorithm="psgpu")
        other = group.all_reduce_init(torch.ones(7), algorithm="pscpu")
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError):
                start_and_wait(other if group.rank == 1 else request)
            with pytest.raises(CollectiveMismatchError):
                group.all_reduce(torch.ones(3 + group.rank), algorithm="psgpu")
            with pytest.raises(TypeError):
                group.all_reduce([] if group.rank else None, algorithm="psgpu")  # type: ignore[arg-type]
        for _ in range(group.rank):
            whole = group.all_reduce(torch.ones(4), algorithm="psgpu")
            assert isinstance(whole, torch.Tensor) and whole.eq(whole[0]).all()
        assert group.join() == group.size - 1
        for _ in range(4):
            whole = group.all_reduce(torch.ones(4), algorithm="psgpu")
            assert isinstance(whole, torch.Tensor) and whole.eq(group.size).all()

    run(way, 3, job)
