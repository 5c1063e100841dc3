"""All-reduces of more than a rank's buffer holds: in pieces, with the bits of messages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from adasum import Adasum, AdasumReducer
from collectives import (
    Average,
    CollectiveError,
    FusedBuffer,
    Group,
    Max,
    Operands,
    Sum,
    calls,
    run_threads,
)
from collectives.execution import (
    shared_memory_all_reduce,
    shared_memory_pieces,
    shared_memory_slices,
)
from collectives.reducers import SumReducer
from collectives.transport.shared_memory.symmetric_memory import SymmetricMemory
from tests.collectives.operators import TrimmedMean

# A slot of four cache lines, so that small vectors have many pieces.
ROOM = shared_memory_pieces.SLOTS * 4 * 64


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shared_memory_all_reduce, shared_memory_pieces):
        monkeypatch.setattr(module, "BUFFER_BYTES", ROOM)


@pytest.fixture
def by_messages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return `run_threads` with symmetric memory used for negotiation alone."""

    def alone(size: int, job: Callable[[Group], Any]) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "plan_shared_memory_all_reduce", lambda *arguments: None)
            return run_threads(size, job)

    return alone


def messages(group: Group) -> list[str]:
    """The steps that are sent from here on."""
    steps: list[str] = []
    exchange = group.transport.exchange

    def counted(sends: Any, recvs: Any, step: str, timeout: float) -> None:
        steps.extend(step for message in sends if message.tensor.numel())
        exchange(sends, recvs, step, timeout)

    group.transport.exchange = counted  # type: ignore[method-assign]
    return steps


def expect_bits_of_messages(
    size: int, job: Callable[[Group], list[Tensor]], sent: set[bool], by_messages: Any
) -> None:
    """Run a job in shared memory and by messages. sent: Where it notes whether it sent any."""
    shared = run_threads(size, job)
    assert sent == {False}
    by_message = by_messages(size, job)
    assert sent == {False, True}
    for mine in (*shared, *by_message):
        assert all(map(torch.equal, mine, shared[0]))


def draw(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype.is_complex:
        return torch.complex(*(draw(rank, count, torch.float32, seed + i) for i in (5, 6)))
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.complex64)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_sums_in_pieces_have_the_bits_of_messages(size: int, by_messages: Any) -> None:
    """By every algorithm that has the method, at counts of whole pieces and beside them."""
    sent: set[bool] = set()

    def job(group: Group) -> list[Tensor]:
        steps, answers = messages(group), []
        for algorithm in ("rechd", "direct"):
            for op in (Sum, Average, Max):
                for dtype in DTYPES[:5] if op is Max else DTYPES:
                    piece = ROOM // 3 // dtype.itemsize
                    for count in (3 * piece + 1, 4 * piece, 7 * piece - 1):
                        tensor = draw(group.rank, count, dtype, count)
                        group.all_reduce(tensor, op, algorithm=algorithm, postscale=0.5)
                        answers.append(tensor)
        # Packed, in a FusedBuffer, and an operator of all operands.
        shapes = (7, 300, 0, 1, 150)
        tensors = [draw(group.rank, n, torch.float32, n) for n in shapes]
        fused = FusedBuffer([torch.empty(n) for n in shapes])
        torch._foreach_copy_(fused.tensors, tensors)
        answers += group.grouped_all_reduce(tensors, Average, algorithm="rechd")
        answers += group.grouped_all_reduce(fused.tensors, Average, algorithm="rechd")
        halves = [draw(group.rank, n, torch.float16, n) for n in (1000, 77)]
        answers += group.grouped_all_reduce(halves, Average, algorithm="rechd", postscale=2.0)
        # Of one or two values, whose mean does not depend on how torch adds more.
        median, vector = TrimmedMean((size - 1) // 2, shared=True), draw(9, 900, torch.float32)
        answers.append(group.all_reduce(vector * (group.rank + 1), median, algorithm="psgpu"))
        sent.add(bool(steps))
        return answers

    expect_bits_of_messages(size, job, sent, by_messages)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_calls_that_follow_each_other_do_not_mix(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late ranks are before a wait and after it; slots are filled with NaN once copied."""
    barrier = SymmetricMemory.barrier

    def late(self: SymmetricMemory, step: str, timeout: float) -> None:
        time.sleep(random.choice((0.0, 2e-3)))
        barrier(self, step, timeout)
        time.sleep(random.choice((0.0, 2e-3)))

    monkeypatch.setattr(SymmetricMemory, "barrier", late)

    def job(group: Group) -> None:
        tensor = torch.empty(ROOM // 4 * 2 + 5)
        request = group.all_reduce_init(tensor, Sum, algorithm="rechd")
        for turn in range(6):
            want = sum(draw(rank, len(tensor), torch.float64, turn) for rank in range(size))
            assert isinstance(want, Tensor)
            tensor.copy_(draw(group.rank, len(tensor), torch.float64, turn))
            request.start()
            request.wait()
            bound = size * torch.finfo(torch.float32).eps * 8
            assert ((tensor - want).abs() <= bound).all()

    run_threads(size, job)


@pytest.mark.usefixtures("small_buffers")
def test_rank_that_fails_between_pieces_is_named_by_the_others() -> None:
    class Fails(SumReducer):
        def reduce(self, operands: Operands) -> None:
            if operands.pieces[0].start >= 2 * ROOM // 3 // 4 and self.rank == 1:
                raise KeyError("piece 2")
            super().reduce(operands)

        rank = 0

    def job(group: Group) -> str:
        op = Fails()
        op.rank = group.rank
        with pytest.raises((CollectiveError, KeyError)) as caught:
            group.all_reduce(torch.ones(5 * ROOM), op, algorithm="rechd")
        with pytest.raises(CollectiveError):
            group.all_reduce(torch.ones(3))
        return str(caught.value)

    first, failed, last = run_threads(3, job, timeout=10.0)
    assert "piece 2" in failed
    for other in (first, last):
        assert "step 3 of all_reduce" in other and "rank 1" in other and "piece 2" in other


@pytest.mark.usefixtures("small_buffers")
def test_call_in_pieces_with_a_joined_rank_adds_zeros() -> None:
    def job(group: Group) -> list[bool]:
        if group.rank == 1:
            group.join()
            return []
        found = []
        for algorithm in ("rechd", "auto"):
            tensor = torch.full((4 * ROOM,), float(group.rank + 1))
            group.all_reduce(tensor, algorithm=algorithm)
            found.append(bool((tensor == 4.0).all()))
        group.join()
        return found

    assert run_threads(3, job) == [[True, True], [], [True, True]]


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of two slots, with a cache line of each slice of 9 ranks or several of fewer."""
    for module in (shared_memory_all_reduce, shared_memory_slices):
        monkeypatch.setattr(module, "BUFFER_BYTES", 2 * 9 * 64)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize(
    "size", [3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 8, 9))]
)
def test_adasum_in_pieces_has_the_bits_of_messages(size: int, by_messages: Any) -> None:
    """Of cut segments, packed tensors, and fused buffers whose padding was left NaN."""
    sent: set[bool] = set()

    def job(group: Group) -> list[Tensor]:
        steps, answers = messages(group), []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
            slot = 9 * 64 // dtype.itemsize
            for count in (2 * slot + 1, size * slot, 3 * size * slot + 7):
                tensor = draw(group.rank, count, dtype, count)
                segments = (0, 5, count // 2, count // 2, count - 1, count)
                group.all_reduce(tensor, Adasum, algorithm="direct", segments=segments)
                answers.append(tensor)
                tensor = draw(group.rank, count, dtype, count + 1)
                group.all_reduce(tensor, Adasum, algorithm="direct", postscale=0.5)
                answers.append(tensor)
        answers.append(group.all_reduce(draw(group.rank, 100_000, torch.float32), Adasum))
        shapes = (7, 300, 0, 1, 1500)
        tensors = [draw(group.rank, n, torch.float32, n) for n in shapes]
        fused = FusedBuffer([torch.empty(n) for n in shapes])
        torch._foreach_copy_(fused.tensors, tensors)
        torch._foreach_add_(fused.padding, float("nan"))
        answers += group.grouped_all_reduce(tensors, Adasum, algorithm="direct")
        answers += group.grouped_all_reduce(fused.tensors, Adasum, algorithm="direct")
        sent.add(bool(steps))
        return answers

    expect_bits_of_messages(size, job, sent, by_messages)


@pytest.mark.usefixtures("small_slots")
def test_slices_of_calls_that_follow_each_other_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late ranks are before a wait and after it, and whatever a slot held before."""
    barrier = SymmetricMemory.barrier

    def late(self: SymmetricMemory, step: str, timeout: float) -> None:
        time.sleep(random.choice((0.0, 1e-3)))
        barrier(self, step, timeout)
        time.sleep(random.choice((0.0, 1e-3)))

    monkeypatch.setattr(SymmetricMemory, "barrier", late)
    count = 3000

    def job(group: Group) -> list[Tensor]:
        tensor = torch.empty(count)
        request = group.all_reduce_init(tensor, Adasum, algorithm="direct")
        answers = []
        for turn in range(6):
            tensor.copy_(draw(group.rank, count, torch.float32, turn))
            request.start()
            request.wait()
            answers.append(tensor.clone())
        return answers

    answers = run_threads(4, job)
    join = kernels.adasum_reference
    for turn, result in enumerate(answers[0]):
        a, b, c, d = (draw(rank, count, torch.float32, turn).double() for rank in range(4))
        want = join(join(a, b), join(c, d))
        assert all(torch.equal(mine[turn], result) for mine in answers)
        assert (result - want).norm() <= 100 * torch.finfo(torch.float32).eps * want.norm()


@pytest.mark.usefixtures("small_slots")
def test_operator_that_fails_between_pieces_is_named_by_the_others() -> None:
    class Fails(AdasumReducer):
        rank = 0

        def reduce(self, operands: Operands) -> None:
            if self.rank == 1:
                raise KeyError("slice 1")
            super().reduce(operands)

    def job(group: Group) -> str:
        op = Fails()
        op.rank = group.rank
        with pytest.raises((CollectiveError, KeyError)) as caught:
            group.all_reduce(torch.ones(3000), op, algorithm="direct")
        return str(caught.value)

    first, failed, last = run_threads(3, job, timeout=10.0)
    assert "slice 1" in failed
    for other in (first, last):
        assert "of all_reduce" in other and "rank 1" in other and "slice 1" in other


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, {"algorithm": "vhdd"})])
@pytest.mark.usefixtures("small_slots")
def test_adasum_in_pairs_beyond_a_buffer_goes_by_messages(
    size: int, options: dict[str, Any]
) -> None:
    def job(group: Group) -> bool:
        steps = messages(group)
        group.all_reduce(draw(group.rank, 3000, torch.float32), Adasum, **options)
        return bool(steps)

    assert run_threads(size, job) == [True] * size
