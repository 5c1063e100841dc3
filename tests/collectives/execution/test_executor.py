"""Messages in parts: right answers, and reducing the first while the second is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from adasum import Adasum
from collectives import CollectiveTimeoutError, Group, Operands, Reducer, Sum, run_threads
from collectives.execution import executor
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.execution.lowering import sent_first
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.schedule import Action, Schedule, Step, Transfer
from collectives.schedules.topology import Topology
from collectives.transport import Message, ThreadWorld, Transport
from tests.collectives.schedules.simulation import one_level
from tests.ptx_emulator.driver import emulated

# Of a message: the third of a buffer of a thousand elements has three.
SMALL = 400


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MIN_PART_BYTES", "_NEAR_PART_BYTES", "_FAR_PART_BYTES"):
        monkeypatch.setattr(executor, name, SMALL)
    monkeypatch.setattr(executor, "_ALIGNED", 4)


@pytest.fixture
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who computes: torch, or what Triton compiles for a GPU, where there would be one."""
    if request.param == "torch":
        yield
        return
    pytest.importorskip("triton")
    with emulated() as emulator:
        yield
    assert emulator.launches


class Late(Transport):
    """A transport that exchanges what is posted in a thread of its own, in order.

    before: called with a part's name before it is exchanged.
    """

    def __init__(self, inner: Transport, before: Callable[[str], None] = lambda step: None) -> None:
        self._inner = inner
        self._before = before
        self._line = ThreadPoolExecutor(1)
        self.rank, self.size = inner.rank, inner.size
        self.posted: list[str] = []

    def posts_ahead(self, device: torch.device) -> bool:
        return True

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        step: str,
        timeout: float,
    ) -> None:
        self.post(sends, recvs, step, timeout)()

    def check_device(self, device: torch.device) -> None:
        self._inner.check_device(device)

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        raise AssertionError("nothing here is split")

    def close(self) -> None:
        self._line.shutdown()

    def post(
        self, sends: Sequence[Message], recvs: Sequence[Message], step: str, timeout: float
    ) -> Callable[[], None]:
        # What is received must not be read before.
        for _, tensor in recvs:
            tensor.fill_(float("nan"))
        self.posted.append(step)

        def run() -> None:
            self._before(step)
            self._inner.exchange(sends, recvs, step, timeout)

        future: Future[None] = self._line.submit(run)
        return lambda: future.result(20.0)


def context(transport: Any) -> CallContext:
    return CallContext(transport, "a test", 20.0, Workspace())


def run(
    schedule: Schedule,
    inputs: Sequence[torch.Tensor],
    op: Reducer,
    segments: Sequence[int] | None = None,
    late: bool = True,
) -> list[torch.Tensor]:
    """Every rank's answer, by threads."""

    def main(group: Group) -> torch.Tensor:
        buffer = inputs[group.rank].clone()
        execute(
            schedule,
            buffer,
            op,
            context(Late(group.transport) if late else group.transport),
            segments=segments,
        )
        return buffer

    return run_threads(len(inputs), main)


def vectors(size: int, numel: int = 1021) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(numel, generator=generator) for _ in range(size)]


def parts_of(transport: Transport, nbytes: int, peer: int = 1) -> int:
    """Of a message of so many bytes, on a machine of two nodes of two ranks."""
    step = replace(context(transport), topology=Topology(4, 2))
    message = Message(peer, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    return executor.parts_of(message, step)


def test_parts_of_a_message_follow_its_length() -> None:
    late = Late(ThreadWorld(4).transport(0))
    found = [parts_of(late, n) for n in (0, 1, 799, 800, 1200, 10**9)]
    assert found == [1, 1, 1, 2, 3, 8]


@pytest.mark.parametrize("numel", [200, 201, 399, 1021, 12345])
def test_parts_of_a_message_cover_it_and_begin_aligned(numel: int) -> None:
    message = Message(3, torch.arange(float(numel)))
    for count in range(2, min(executor.MAX_PARTS, 4 * numel // SMALL) + 1):
        found = executor._parts(message, count)
        assert len(found) == count
        assert torch.equal(torch.cat([part.tensor for part in found]), message.tensor)
        assert all(part.peer == 3 and part.tensor.numel() for part in found)
        assert all(part.tensor.storage_offset() % 4 == 0 for part in found)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sum_in_parts_is_the_sum(name: str, size: int) -> None:
    """The bits of whole messages: cutting changes no element's sum."""
    schedule = one_level(name, 1, Topology(size, size))
    inputs = vectors(size)
    whole = run(schedule, inputs, Sum, late=False)
    for answer in run(schedule, inputs, Sum):
        assert torch.equal(answer, whole[0])


# Five ranks take the steps of four, after the fifth has handed its vector over.
_ADASUM = [("vhdd", 2), ("vhdd", 4), ("vhdd", 5), ("rd", 3), *(("direct", n) for n in (2, 3, 5))]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("segments", [None, (0, 1, 130, 130, 700, 1021)])
@pytest.mark.parametrize(
    ("_kernels", "name", "size"),
    [
        # Emulated, many ranks take long.
        pytest.param(
            *(kernels, name, size),
            marks=pytest.mark.slow if size == 4 or (kernels == "emulator" and size > 2) else (),
        )
        for kernels in ("torch", "emulator")
        for name, size in _ADASUM
    ],
    indirect=["_kernels"],
)
def test_adasum_in_parts_is_its_definition(
    name: str, size: int, segments: Sequence[int] | None
) -> None:
    """Equal bits on all ranks. Beside whole messages only the order of the dots' sums differs.

    Those are sums of float64: what comes of another order is far below float32's last place, which
    each of three levels may round to the other side.
    """
    inputs = vectors(size)
    schedule = one_level(name, 1, Topology(size, size))
    whole = run(schedule, inputs, Adasum, segments, late=False)
    answers = run(schedule, inputs, Adasum, segments)
    reach = torch.stack(inputs).abs().sum(0)
    for answer in answers:
        assert torch.equal(answer, answers[0])
        assert ((answer - whole[0]).abs() <= 3 * torch.finfo(torch.float32).eps * reach).all()


def test_part_is_reduced_while_the_next_travels() -> None:
    """The second part of a step is not let go before the first was reduced."""
    size, seen = 2, [threading.Event() for _ in range(2)]

    class Watched(Reducer):
        def reduce(self, operands: Operands) -> None:
            assert len(operands.pieces) == 5
            for parts, out, _ in operands.pieces:
                assert not any(part.isnan().any() for part in parts)
                torch.add(*parts, out=out)
                seen[threading.current_thread().name == "rank-1"].set()

    def main(group: Group) -> list[str]:
        def before(step: str) -> None:
            if "step 0" in step and "part 0" not in step and not seen[group.rank].wait(10.0):
                raise CollectiveTimeoutError(f"{step} waited for the part before it")

        late = Late(group.transport, before)
        buffer = vectors(size)[group.rank].clone()
        execute(
            one_level("rechd", 1, Topology(size, size)),
            buffer,
            Watched(),
            context(late),
        )
        assert torch.equal(buffer, torch.add(*vectors(size)))
        return late.posted

    first, _ = run_threads(size, main)
    names = [f"step {step} (rechd) of a test, part {i} of 5" for step in (0, 1) for i in range(5)]
    assert first == names


def test_sent_first_tells_what_is_still_to_be_sent() -> None:
    def step(*sends: Transfer) -> Step:
        return Step(sends, (Transfer(1, 2, 4, Action.REDUCE_LEFT), Transfer(1, 0, 8)))

    assert sent_first(step(Transfer(1, 0, 2), Transfer(2, 4, 6), Transfer(1, 2, 4)))
    assert not sent_first(step(Transfer(1, 0, 3)))
    assert not sent_first(step(Transfer(1, 2, 8)))
