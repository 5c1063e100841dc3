"""All-reduces in shared memory: the bits of those by messages, without any message."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from collectives.execution.shared_memory_all_reduce import (
    ONE_SHOT_BYTES,
    plan_shared_memory_all_reduce,
)

import collectives
from adasum import Adasum, AdasumReducer
from collectives import (
    Average,
    CollectiveError,
    CollectiveMismatchError,
    FusedBuffer,
    Group,
    Operands,
    Reducer,
    Sum,
    calls,
)
from collectives.reducers import SumReducer, kernels
from collectives.transport.shared_memory.symmetric_memory import (
    BUFFER_BYTES,
    TABLE_BYTES,
    SymmetricMemory,
)
from tests.adasum import definition

OPS = {"Sum": Sum, "Average": Average, "Adasum": Adasum}
SMALL, ROOM = ONE_SHOT_BYTES // 4, BUFFER_BYTES // 4


def data(group: Group | Rank, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


class Rank(NamedTuple):
    rank: int


def messages(group: Group) -> list[str]:
    """The steps that are sent from here on."""
    steps: list[str] = []
    exchange = group.transport.exchange

    def counted(sends: Any, recvs: Any, step: str, timeout: float) -> None:
        steps.extend(step for message in sends if message.tensor.numel())
        exchange(sends, recvs, step, timeout)

    group.transport.exchange = counted  # type: ignore[method-assign]
    return steps


run = collectives.run_threads


@pytest.fixture
def by_messages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return `run` with symmetric memory used for negotiation alone."""

    def alone(size: int, job: Callable[[Group], Any]) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "plan_shared_memory_all_reduce", lambda *arguments: None)
            return run(size, job)

    return alone


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_all_reduce_in_one_shot_has_the_bits_of_messages(
    size: int, op: str, by_messages: Any
) -> None:
    sent_any: set[bool] = set()

    def job(group: Group) -> list[torch.Tensor]:
        steps = messages(group)
        answers = []
        for i, count in enumerate((1, 63, 4099)):
            dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            for dtype in dtypes if op == "Adasum" else (*dtypes, torch.complex64):
                bounds = [0, count // 3, count // 3, count]
                tensor = data(group, count, dtype, i) if dtype.is_floating_point else None
                if tensor is None:
                    tensor = torch.complex(data(group, count), data(group, count, seed=9))
                group.all_reduce(tensor, OPS[op], algorithm="rd", segments=bounds, postscale=0.5)
                answers.append(tensor)
        if op == "Sum":
            answers.append(group.all_reduce(data(group, 99, torch.int64), algorithm="rd"))
        sent_any.add(bool(steps))
        return answers

    shared = run(size, job)
    assert sent_any == {False}
    sent = by_messages(size, job)
    assert sent_any == {False, True}
    for mine, other in zip(shared, sent, strict=True):
        for a, b, first in zip(mine, other, shared[0], strict=True):
            assert torch.equal(a, b) and torch.equal(a, first)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fused", [True, False])
def test_grouped_all_reduce_in_shared_memory_has_the_bits_of_messages(
    op: str, fused: bool, by_messages: Any
) -> None:
    sent_any: set[bool] = set()

    def job(group: Group) -> list[torch.Tensor]:
        steps = messages(group)
        tensors = [data(group, count, seed=count) for count in (5, 0, 700, 1, 64)]
        if fused and group.rank != 1:
            # Whether they lie in one buffer already is a rank's own matter.
            buffer = FusedBuffer(tensors)
            torch._foreach_copy_(buffer.tensors, tensors)
            tensors = list(buffer.tensors)
        group.grouped_all_reduce(tensors, OPS[op], algorithm="rd")
        sent_any.add(bool(steps))
        return [tensor.clone() for tensor in tensors]

    shared = run(3, job)
    assert sent_any == {False}
    sent = by_messages(3, job)
    for mine, other in zip(shared, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_all_reduce_of_one_size_after_another_gives_each_sum() -> None:
    """A buffer is not written to while another rank may read it."""

    def job(group: Group) -> None:
        for call in range(300):
            tensor = torch.full((1 + call * 997 % SMALL,), float(call))
            group.all_reduce(tensor, algorithm=("rd", "rechd", "rechd")[call % 3])
            assert bool((tensor == 4.0 * call).all()), call

    run(4, job)


@pytest.mark.parametrize(
    ("count", "options", "sent"),
    [
        (SMALL, {"algorithm": "rd"}, False),
        (SMALL + 1, {"algorithm": "rd"}, True),
        (ROOM, {"algorithm": "rechd"}, False),
        (ROOM + 1, {"algorithm": "rechd"}, False),
        (7, {"algorithm": "rechd"}, False),
        (7, {"algorithm": "rechd#2"}, True),
        (7, {"algorithm": "xring"}, True),
        (7, {"algorithm": "rechd/rechd"}, True),
        (ROOM, {"algorithm": "rd:1k:xring"}, True),
        (1024, {"algorithm": "rd:1k:xring"}, False),
        (7, {"algorithm": "rd", "prescale": 0.5}, True),
        (0, {"algorithm": "rd"}, False),
        (7, {}, False),
    ],
)
def test_all_reduce_in_shared_memory_sends_messages_where_it_must(
    count: int, options: dict[str, Any], sent: bool
) -> None:
    def job(group: Group) -> bool:
        steps = messages(group)
        tensor = torch.ones(count)
        group.all_reduce(tensor, **options)
        scale = options.get("prescale", 1.0)
        assert torch.equal(tensor, torch.full((count,), 3.0 * scale))
        return bool(steps)

    assert run(3, job) == [sent] * 3


@pytest.mark.parametrize("algorithm", ["rechd", "direct"])
@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_sum_in_slices_has_the_bits_of_messages(
    size: int, op: str, algorithm: str, by_messages: Any
) -> None:
    def job(group: Group) -> list[torch.Tensor]:
        answers = []
        for count, dtype in ((1, torch.float32), (17, torch.float64), (4099, torch.bfloat16)):
            tensor = data(group, count, dtype)
            group.all_reduce(tensor, OPS[op], algorithm=algorithm)
            answers.append(tensor)
        return answers

    shared, sent = run(size, job), by_messages(size, job)
    for mine, other in zip(shared, sent, strict=True):
        for a, b, first in zip(mine, other, shared[0], strict=True):
            assert torch.equal(a, b) and torch.equal(a, first)


@pytest.mark.parametrize("algorithm", ["vhdd", "direct"])
@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_adasum_in_slices_has_the_bits_of_messages(
    size: int, spins: bool, algorithm: str, by_messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the slices cut segments, with enough processors or not; by its definition."""
    monkeypatch.setattr(SymmetricMemory, "workers", size if spins else 1)

    def bounds(count: int) -> list[int]:
        return sorted({0, count // 7, count // 2, count})

    def job(group: Group) -> list[torch.Tensor]:
        steps = messages(group)
        answers = []
        for count, dtype in ((1, torch.float32), (40, torch.bfloat16), (100_003, torch.float32)):
            tensor = data(group, count, dtype)
            group.all_reduce(tensor, Adasum, algorithm=algorithm, segments=bounds(count))
            answers.append(tensor)
        sent.add(bool(steps))
        return answers

    sent: set[bool] = set()
    shared, again = run(size, job), run(size, job)
    assert sent == {False}
    by_message = by_messages(size, job)
    assert sent == {False, True}
    for mine in (*shared, *again, *by_message):
        assert all(torch.equal(a, b) for a, b in zip(mine, shared[0], strict=True))
    inputs = [data(Rank(rank), 100_003).double() for rank in range(size)]
    want = definition.tree(inputs, bounds(100_003))
    # Coefficients are float64's; each of up to four levels rounds its two products and their sum.
    eps = torch.finfo(torch.float32).eps
    assert (shared[0][-1].double() - want).norm() <= 12 * eps * want.norm()


@pytest.mark.parametrize("offset", [0, 1])
def test_by_direct_no_rank_copies_what_it_alone_reads(offset: int) -> None:
    """Of its own vector, but for the first rank's buffer, where the result is made."""
    size, count = 3, 3 * SMALL

    def job(group: Group) -> tuple[int, Any]:
        memory = group.transport.symmetric_memory
        # Both buffers: calls take turns with them.
        memory._buffers[:, group.rank, : 4 * count].view(torch.float32).fill_(7.0)
        tensor = data(group, count + offset)[offset:]
        result = group.all_reduce(tensor, Adasum, algorithm="direct")
        mine = memory.buffers(count, torch.float32)[group.rank]
        return int((mine == 7.0).sum()), result

    kept, results = zip(*run(size, job), strict=True)
    assert kept == (0, SMALL, SMALL)
    vectors = [data(Rank(rank), count + offset)[offset:] for rank in range(size)]
    expected = definition.tree(vectors)
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [3, 4])
def test_adasum_of_nearly_opposed_vectors_in_slices_has_the_bits_of_messages(
    size: int, by_messages: Any
) -> None:
    """Whose Gram matrices are gathered once more, as sums of two: in one segment of three."""

    def job(group: Group) -> torch.Tensor:
        common = data(Rank(0), 30_011, seed=3)
        tensor = data(group, 30_011)
        tensor[7000:20_000] += 1e6 * (-1) ** group.rank * common[7000:20_000]
        bounds = [0, 7000, 20_000, 30_011]
        return group.all_reduce(tensor, Adasum, algorithm="direct", segments=bounds)

    shared, sent = run(size, job), by_messages(size, job)
    assert all(torch.equal(each, shared[0]) for each in (*shared, *sent))


@pytest.mark.parametrize(("algorithm", "row"), [("vhdd", 24), ("direct", 16 * 2 * 2)])
def test_adasum_of_more_segments_than_a_table_holds_goes_by_messages(
    algorithm: str, row: int
) -> None:
    rows = TABLE_BYTES // row

    def job(group: Group) -> list[bool]:
        steps = messages(group)
        seen = []
        for count in (rows, rows + 1):
            steps.clear()
            bounds = range(count + 1)
            group.all_reduce(torch.ones(count), Adasum, algorithm=algorithm, segments=bounds)
            seen.append(bool(steps))
        return seen

    assert run(2, job) == [[False, True]] * 2


def test_grouped_all_reduce_of_two_dtypes_gives_each_sum() -> None:
    def job(group: Group) -> None:
        tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(2)]
        group.grouped_all_reduce(tensors, algorithm="rd")
        assert all(bool((tensor == 2.0).all()) for tensor in tensors)

    run(2, job)


def test_operator_that_calls_other_ranks_goes_by_messages() -> None:
    class Asking(SumReducer):
        reduces_in_shared_memory = False

    asking = Asking()

    def job(group: Group) -> bool:
        steps = messages(group)
        group.all_reduce(torch.ones(3), asking, algorithm="rd")
        return bool(steps)

    assert run(2, job) == [True, True]
    assert not Reducer.reduces_in_shared_memory, "what has not said so calls others"


def test_operator_that_sums_partials_twice_raises() -> None:
    class Twice(AdasumReducer):
        def reduce(self, operands: Operands) -> None:
            if operands.sum_partials is not None:
                operands.sum_partials(torch.zeros(len(operands.segments or (0, 9)) - 1, 3))
            super().reduce(operands)

    twice = Twice()

    def job(group: Group) -> None:
        with pytest.raises((TypeError, CollectiveError), match=r"not once|rank"):
            group.all_reduce(torch.ones(9), twice, algorithm="vhdd")

    run(2, job, timeout=0.5)


def test_partial_sums_not_contiguous_raise() -> None:
    """Sums written to a copy of them would be lost."""

    class Turned(AdasumReducer):
        def reduce(self, operands: Operands) -> None:
            if operands.sum_partials is not None:
                operands.sum_partials(torch.ones(3, 4, dtype=torch.float64).t())

    def job(group: Group) -> None:
        with pytest.raises((RuntimeError, CollectiveError), match=r"view size|rank"):
            group.all_reduce(torch.ones(9), Turned(), algorithm="vhdd", segments=(0, 5, 9))

    run(2, job, timeout=0.5)


def test_mismatch_leaves_tensors_and_group_as_they_were() -> None:
    def job(group: Group) -> None:
        for turn in range(3):
            mine = data(group, 30 + (group.rank == turn))
            before = mine.clone()
            with pytest.raises(CollectiveMismatchError, match="shape"):
                group.all_reduce(mine, Adasum)
            assert torch.equal(mine, before)
            assert float(group.all_reduce(torch.ones(1))) == 3.0

    run(3, job)


def test_all_reduce_with_a_joined_rank_adds_zeros() -> None:
    def job(group: Group) -> None:
        if group.rank == 1:
            group.join([Adasum])
            return
        for _ in range(3):
            tensor = torch.arange(1.0, 9.0)
            group.all_reduce(tensor, Adasum)
            # The mean of two equal vectors, the joined rank's 0 being the identity: two
            # coefficients, their products and the sum are rounded, by half an eps each.
            error = (tensor - torch.arange(1.0, 9.0)).abs() / torch.arange(1.0, 9.0)
            assert error.max() <= 1.5 * torch.finfo(torch.float32).eps
        group.join([Adasum])

    run(3, job)


def test_grouped_all_reduce_packs_each_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = kernels.pack

    def counted(*args: Any, **options: Any) -> Any:
        packed.append(1)
        return pack(*args, **options)

    monkeypatch.setattr(kernels, "pack", counted)
    run(2, lambda group: group.grouped_all_reduce([torch.ones(3), torch.ones(4)]))
    assert len(packed) == 2


@pytest.mark.parametrize("numel", [SMALL, SMALL + 1], ids=["small", "large"])
@pytest.mark.parametrize("op", OPS)
def test_memory_of_a_call_that_has_ended_is_held_by_no_cycle(
    op: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def planned(*args: Any) -> Any:
        plan = plan_shared_memory_all_reduce(*args)
        plans.append(weakref.ref(plan))
        return plan

    monkeypatch.setattr(calls, "plan_shared_memory_all_reduce", planned)
    gc.disable()
    try:
        collectives.run_threads(3, lambda group: group.all_reduce(data(group, numel), OPS[op]))
    finally:
        gc.enable()
    assert [plan() for plan in plans] == [None] * 3
