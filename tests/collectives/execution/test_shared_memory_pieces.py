"""All-reduces of more than a rank's buffer holds: in pieces, with the bits of messages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adasum import Adasum
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
from collectives.execution import shared_memory_all_reduce, shared_memory_pieces
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

    shared = run_threads(size, job)
    assert sent == {False}
    by_message = by_messages(size, job)
    assert sent == {False, True}
    for mine in (*shared, *by_message):
        assert all(map(torch.equal, mine, shared[0]))


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


@pytest.mark.usefixtures("small_buffers")
def test_adasum_beyond_a_buffer_goes_by_messages_of_the_same_algorithm() -> None:
    def job(group: Group) -> tuple[bool, bool]:
        steps = messages(group)
        tensor, named = (draw(group.rank, 100_000, torch.float32) for _ in range(2))
        group.all_reduce(tensor, Adasum)
        sent = bool(steps)
        group.all_reduce(named, Adasum, algorithm="direct")
        return sent, torch.equal(tensor, named)

    assert run_threads(4, job) == [(True, True)] * 4
