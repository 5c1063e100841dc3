"""All-reduces in shared memory: the bits of those by messages, without any message."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from adasum import Adasum, AdasumReducer
from collectives import (
    Average,
    CollectiveError,
    FusedBuffer,
    Group,
    Max,
    Operands,
    Reducer,
    Sum,
    calls,
    run_threads,
)
from collectives.execution import shared_memory
from collectives.reducers import SumReducer
from collectives.transport.symmetric_memory import SymmetricMemory
from tests.adasum import definition

OPS: dict[str, Reducer] = {"Sum": Sum, "Average": Average, "Adasum": Adasum}
# Elements of float32 that each rank may read of all others.
SMALL = shared_memory._ONE_SHOT_BYTES // 4
EPS = torch.finfo(torch.float32).eps
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def draw(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype.is_complex:
        return torch.complex(*(draw(rank, count, torch.float32, seed + i) for i in (5, 6)))
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def tensors_of(rank: int, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
    tensors = [draw(rank, count, dtype, count) for count in (7, 300, 0, 1, 150)]
    if not fused:
        return tensors
    buffer = FusedBuffer([torch.empty_like(tensor) for tensor in tensors])
    torch._foreach_copy_(buffer.tensors, tensors)
    # What an earlier reduction may have left.
    torch._foreach_add_(buffer.padding, float("nan"))
    return list(buffer.tensors)


@contextmanager
def messages(group: Group) -> Iterator[list[str]]:
    """The steps that are sent meanwhile."""
    steps: list[str] = []
    exchange = group.transport.exchange

    def counted(sends: Any, recvs: Any, step: str, timeout: float) -> None:
        steps.extend(step for message in sends if message.tensor.numel())
        exchange(sends, recvs, step, timeout)

    group.transport.exchange = counted  # type: ignore[method-assign]
    yield steps
    group.transport.exchange = exchange  # type: ignore[method-assign]


def sends(group: Group, call: Callable[[], Any]) -> bool:
    with messages(group) as steps:
        call()
    return bool(steps)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Any], list[Tensor]]:
    """Run a job in shared memory, twice, and with it used for negotiation alone.

    Every rank's answers must have the same bits. They are returned.
    """

    def run(size: int, job: Callable[[Group], list[Tensor]]) -> list[Tensor]:
        def noted(group: Group) -> tuple[bool, list[Tensor]]:
            with messages(group) as steps:
                answers = job(group)
            return bool(steps), answers

        found = [run_threads(size, noted) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(calls, "plan_host_all_reduce", lambda *arguments: None)
            found.append(run_threads(size, noted))
        first = found[0][0][1]
        for by_messages, ranks in zip((False, False, True), found, strict=True):
            for sent, answers in ranks:
                assert sent == by_messages
                for i, (a, b) in enumerate(zip(answers, first, strict=True)):
                    assert torch.equal(a, b), i
        return first

    return run


@pytest.mark.parametrize("algorithm", ["rd", "rechd", "direct"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_sums_have_the_bits_of_messages(size: int, algorithm: str, compare: Any) -> None:
    def job(group: Group) -> list[Tensor]:
        answers, options = [], {"algorithm": algorithm, "postscale": 0.5}
        for dtype in (*FLOATS, torch.int64):
            for count in (1, 63, 4099):
                for op in (Sum, Average, Max) if not dtype.is_complex else (Sum, Average):
                    mine = draw(group.rank, count, dtype, count)
                    bounds = [0, count // 3, count // 3, count]
                    answers.append(group.all_reduce(mine, op, segments=bounds, **options))
                if dtype != torch.int64:
                    mine = draw(group.rank, count, dtype, count)
                    answers.append(group.all_reduce(mine, order="tree", **options))
        for count in (SMALL // size + 1, 2 * SMALL + 3):
            answers.append(group.all_reduce(draw(group.rank, count), algorithm=algorithm))
        for op in (Sum, Average):
            for dtype in (torch.float32, torch.float16):
                # Whether they lie in one buffer already is a rank's own matter.
                mine = tensors_of(group.rank, dtype, fused=group.rank != 1)
                answers += [each.clone() for each in group.grouped_all_reduce(mine, op, **options)]
        return answers

    compare(size, job)


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_adasum_by_direct_has_the_bits_of_messages_and_is_its_definition(
    size: int, spins: bool, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the slices cut segments, with enough processors or not."""
    monkeypatch.setattr(SymmetricMemory, "workers", size if spins else 1)

    def bounds(count: int) -> list[int]:
        return sorted({0, count // 7, count // 2, count})

    names = ["direct", "direct#2"] if size > 2 else ["direct", "vhdd", "rechd"]

    def job(group: Group) -> list[Tensor]:
        answers = []
        for name in names:
            options: dict[str, Any] = {"algorithm": name, "postscale": 0.5}
            for count, dtype in ((1, torch.float32), (40, torch.bfloat16), (5003, torch.complex64)):
                mine = draw(group.rank, count, dtype)
                answers.append(group.all_reduce(mine, Adasum, segments=bounds(count), **options))
            for fused in (False, True):
                mine = tensors_of(group.rank, torch.float32, fused=fused)
                group.grouped_all_reduce(mine, Adasum, **options)
                answers += [each.clone() for each in mine]
            mine = draw(group.rank, 100_003)
            group.all_reduce(mine, Adasum, algorithm=name, segments=bounds(100_003))
            answers.append(mine)
        return answers

    answers = compare(size, job)
    inputs = [draw(rank, 100_003).double() for rank in range(size)]
    want = definition.tree(inputs, bounds(100_003))
    # Coefficients are float64's; each of up to four levels rounds its two products and their sum.
    for got in answers[len(answers) // len(names) - 1 :: len(answers) // len(names)]:
        assert (got.double() - want).norm() <= 12 * EPS * want.norm()


@pytest.mark.parametrize(
    ("count", "op", "options", "sent"),
    [
        (7, Sum, {}, False),
        (0, Sum, {"algorithm": "rd"}, False),
        (SMALL + 1, Sum, {"algorithm": "rd"}, False),
        (7, Sum, {"algorithm": "rechd#2"}, True),
        (7, Sum, {"algorithm": "xring"}, True),
        (7, Sum, {"algorithm": "rechd/rechd"}, True),
        (4096, Sum, {"algorithm": "rd:1k:xring"}, True),
        (1024, Sum, {"algorithm": "rd:1k:xring"}, False),
        (7, Sum, {"algorithm": "rd", "prescale": 0.5}, True),
        (7, Adasum, {"algorithm": "rd"}, False),
        (SMALL + 1, Adasum, {"algorithm": "rd"}, False),
        (7, Adasum, {"algorithm": "vhdd"}, False),
        (7, Adasum, {"algorithm": "rechd/vhdd"}, True),
    ],
)
def test_call_sends_messages_where_it_must(
    count: int, op: Reducer, options: dict[str, Any], sent: bool
) -> None:
    def job(group: Group) -> bool:
        mine = torch.ones(count)
        answer = sends(group, lambda: group.all_reduce(mine, op, **options))
        want = (3.0 if op is Sum else 1.0) * options.get("prescale", 1.0)
        assert torch.allclose(mine, torch.full((count,), want), rtol=4 * EPS)
        return answer

    assert run_threads(3, job) == [sent] * 3


def test_call_beyond_a_buffer_goes_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "BUFFER_BYTES", 4 * 1000)

    def job(group: Group) -> list[bool]:
        return [
            sends(group, lambda n=n, op=op: group.all_reduce(draw(group.rank, n), op))
            for op in (Sum, Adasum)
            for n in (1000, 1001)
        ]

    assert run_threads(3, job) == [[False, True] * 2] * 3


def test_operator_that_has_not_said_that_it_calls_no_rank_goes_by_messages() -> None:
    class Asking(SumReducer):
        reduces_in_shared_memory = False

    def job(group: Group) -> bool:
        return sends(group, lambda: group.all_reduce(torch.ones(3), Asking(), algorithm="rd"))

    assert run_threads(2, job) == [True, True]
    assert not Reducer.reduces_in_shared_memory, "what has not said so calls others"


@pytest.mark.parametrize("op", OPS)
def test_calls_that_follow_each_other_do_not_mix(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is not written to while another rank may read it, however late ranks are.

    Direct calls and starts of one request, of one size after another.
    """
    barrier, wait = SymmetricMemory.barrier, SymmetricMemory.wait

    def late(method: Any) -> Any:
        def run(self: SymmetricMemory, step: str, timeout: float) -> None:
            time.sleep(random.choice((0.0, 0.0, 5e-4)))
            method(self, step, timeout)
            time.sleep(random.choice((0.0, 0.0, 5e-4)))

        return run

    monkeypatch.setattr(SymmetricMemory, "barrier", late(barrier))
    monkeypatch.setattr(SymmetricMemory, "wait", late(wait))
    names = ("auto", "direct") if op == "Adasum" else ("rd", "rechd", "direct")
    factor = {"Sum": 4.0, "Average": 1.0, "Adasum": 1.0}[op]

    def job(group: Group) -> None:
        flat = torch.empty(3 * SMALL)
        request = group.all_reduce_init(flat, OPS[op])
        for call in range(60):
            mine = torch.full((1 + call * 9973 % (2 * SMALL),), float(call))
            group.all_reduce(mine, OPS[op], algorithm=names[call % len(names)])
            flat.fill_(call)
            if call % 4 == 0:
                request.start()
                request.wait()
            for each in (mine, flat) if call % 4 == 0 else (mine,):
                want = torch.full_like(each, factor * call)
                assert torch.allclose(each, want, rtol=12 * EPS), call

    run_threads(4, job)


@pytest.mark.parametrize("count", [8, SMALL + 1])
def test_joined_rank_adds_zeros(count: int) -> None:
    def job(group: Group) -> None:
        if group.rank != 1:
            want = torch.arange(1.0, 1.0 + count)
            for name in ("auto", "direct"):
                # The mean of two equal vectors, the joined rank's 0 being the identity: two
                # coefficients, their products and the sum are rounded, by half an eps each.
                mine = group.all_reduce(want.clone(), Adasum, algorithm=name)
                assert ((mine - want).abs() / want).max() <= 1.5 * EPS
                assert torch.equal(group.all_reduce(want.clone(), algorithm=name), 2 * want)
        group.join([Adasum])

    run_threads(3, job)


@pytest.mark.parametrize("kind", [SumReducer, AdasumReducer])
def test_operator_that_fails_on_one_rank_is_named_by_the_others(kind: type) -> None:
    def reduce(self: Any, operands: Operands) -> None:
        if self.rank == 1:
            raise KeyError("slice 1")
        kind.reduce(self, operands)

    failing = type("Fails", (kind,), {"reduce": reduce})

    def job(group: Group) -> str:
        op = failing()
        op.rank = group.rank
        with pytest.raises((CollectiveError, KeyError)) as caught:
            group.all_reduce(draw(group.rank, 3 * SMALL), op, algorithm="direct")
        with pytest.raises(CollectiveError):
            group.barrier()
        return str(caught.value)

    first, failed, last = run_threads(3, job, timeout=10.0)
    assert "slice 1" in failed
    for other in (first, last):
        assert "of all_reduce" in other and "rank 1" in other and "slice 1" in other
