"""No race between streams, however a group's calls are mixed; streams.py says what that shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adasum import Adasum, Compression
from adasum.compression import Compressor
from adasum.optimizer.bucket import Part
from adasum.optimizer.record import Record
from adasum.optimizer.reduction import BucketReducer
from collectives import Average, Group, Reducer, Sum, Work
from collectives.cost import ASSUMED, Cost, LinkRates, estimate
from collectives.execution import executor
from collectives.execution.phases import Libraries
from collectives.reducers import SumReducer
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.spec import OUTER
from collectives.schedules.topology import Topology
from tests.collectives.queues import Queue
from tests.collectives.transport import streams
from tests.collectives.transport.streams import Stream, machine, on_gpu
from tests.collectives.transport.streams_nccl import on_ranks
from tests.frozen.calls import line

NUMEL = 5000


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    streams.install(monkeypatch)
    monkeypatch.setattr(executor, "_MIN_PART_BYTES", 4096)
    monkeypatch.setattr(executor, "_NEAR_PART_BYTES", 4096)
    monkeypatch.setattr(executor, "_FAR_PART_BYTES", 4096)


def run(work: Callable[[Group], object], size: int = 2, local_size: int | None = None) -> list[str]:
    """The races of `work` on every rank, a thread each, on one node unless given."""

    def main(group: Group) -> None:
        work(group)
        machine.collect()

    on_ranks(size, main, local_size)
    return machine.races


def mine(group: Group, numel: int = NUMEL) -> torch.Tensor:
    return on_gpu(torch.full((numel,), 1.0 + group.rank))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["nccl", *SCHEDULES, "xring#2"])
def test_one_call_after_the_other(algorithm: str, size: int) -> None:
    op = Adasum if algorithm in ("vhdd", "direct") else Sum

    def work(group: Group) -> None:
        for _ in range(2):
            tensor = mine(group)
            group.all_reduce(tensor, op, algorithm=algorithm, postscale=0.5)
            tensor.add_(1.0)
            if op is Sum:
                assert streams.plain(tensor)[0] == sum(range(size + 1)) / 2 + 1

    assert run(work, size) == []


@pytest.mark.parametrize(
    ("algorithm", "topology", "groups"),
    [
        ("direct", Topology(8, 8), 3),
        ("vhdd", Topology(8, 8), 6 + 1 + 2 + 3),
        ("direct", Topology(16, 8), 3),
    ],
    ids=str,
)
def test_groups_of_nccl_are_those_that_the_model_prices(
    algorithm: str, topology: Topology, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    access = machine.access

    def counted(what: str, stream: Stream, reads: Any, writes: Sequence[torch.Tensor]) -> None:
        if what == "a group of NCCL's":
            sizes.append(sum(tensor.nbytes for tensor in writes))
        access(what, stream, reads, writes)

    monkeypatch.setattr(machine, "access", counted)
    for parts in ("_NEAR_PART_BYTES", "_FAR_PART_BYTES"):
        monkeypatch.setattr(executor, parts, 1 << 30)

    def work(group: Group) -> None:
        group.all_reduce(mine(group, 8000), Adasum, algorithm=algorithm)

    size = topology.size
    assert run(work, size, topology.local_size) == []
    price = priced(algorithm, topology)
    assert len(sizes) == size * groups
    assert sum(sizes) == price.intra + price.inter
    free = replace(ASSUMED, host=0.0)
    each = (price.seconds - priced(algorithm, topology, free).seconds) / ASSUMED.host
    assert each == pytest.approx(groups)


def priced(algorithm: str, topology: Topology, rates: LinkRates = ASSUMED) -> Cost:
    return estimate(algorithm, 32000, rates, topology, "adasum")


@pytest.mark.parametrize("outer", [*OUTER, "pscpu#2"])
@pytest.mark.parametrize("inner", ["nccl", "nccl#2", "xring", "pscpu", "psgpu"])
def test_two_levels(inner: str, outer: str) -> None:
    op = Adasum if outer in ("rd", "vhdd", "direct") else Sum

    def work(group: Group) -> None:
        tensor = mine(group)
        group.all_reduce(tensor, op, algorithm=f"{inner}/{outer}")
        tensor.add_(1.0)
        if op is Sum:
            assert torch.equal(streams.plain(tensor), torch.full((NUMEL,), 11.0))

    assert run(work, 4, local_size=2) == []


def test_the_races_are_seen() -> None:
    def work(group: Group) -> None:
        tensor = mine(group)
        work = group.all_reduce(tensor, algorithm="rd", async_op=True)
        while not work.has_ended():
            pass
        tensor.add_(1.0)

    assert any(race.startswith("add_ beside sum_n") for race in run(work))


@pytest.mark.parametrize("algorithm", ["rd", "rechd", "psgpu"])
def test_a_call_behind_one_that_nobody_waited_for(algorithm: str) -> None:
    """Both use the group's memory for what is received, on two streams."""

    def work(group: Group) -> None:
        first, second = mine(group), mine(group)
        work = group.all_reduce(first, algorithm=algorithm, async_op=True)
        while not work.has_ended():
            pass
        group.all_reduce(second, algorithm=algorithm)
        work.wait()

    assert run(work) == []


def test_a_group_of_tensors_on_both_devices() -> None:
    def work(group: Group) -> None:
        tensors = [torch.ones(5), mine(group)]
        tensors[1].add_(1.0)
        work = group.grouped_all_reduce(tensors, async_op=True)
        work.wait()
        tensors[1].add_(1.0)
        assert streams.plain(tensors[1])[0] == 6.0

    assert run(work) == []


@pytest.mark.parametrize("op", [Adasum, Average])
@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16])
def test_buckets_of_gradients(compression: type[Compressor], op: Reducer) -> None:
    """In a buffer of their own, made in the first step."""
    names = ["a", "b", "c"]

    def work(group: Group) -> None:
        reducer = BucketReducer(group, op, compression)
        parameters = [mine(group, numel) for numel in (3, NUMEL, 7)]
        members = [(Record(name), p) for name, p in zip(names, parameters, strict=True)]
        part: Part | None = None
        for step in range(3):
            for parameter in parameters:
                new = mine(group, parameter.numel())
                parameter.grad = new if step == 0 else parameter.grad.add_(new)
            gradients = [parameter.grad for parameter in parameters]
            part = part or Part("a bucket", members, gradients, compression, counts=reducer.counts)
            part.pack(gradients, 0.5)
            reducer.start(part, lambda _: None).wait()
            part.unpack(2.0)
            for parameter in parameters:
                parameter.grad.mul_(2.0)
            del new
            machine.collect()

    assert run(work) == []


CALLS: dict[str, Callable[[Group, torch.Tensor, bool], Any]] = {
    "broadcast": lambda group, tensor, later: group.broadcast(
        tensor.clone(), root=group.size - 1, async_op=later
    ),
    "reduce": lambda group, tensor, later: group.reduce(tensor.clone(), async_op=later),
    "reduce_scatter": lambda group, tensor, later: group.reduce_scatter(tensor, async_op=later),
    "adasum_scatter": lambda group, tensor, later: group.reduce_scatter(
        tensor, Adasum, async_op=later
    ),
    "all_gather": lambda group, tensor, later: group.all_gather(tensor, async_op=later),
    "all_gather out": lambda group, tensor, later: group.all_gather(
        tensor, out=on_gpu(torch.empty(group.size * tensor.numel())), async_op=later
    ),
    "reduce_scatter out": lambda group, tensor, later: group.reduce_scatter(
        tensor, out=on_gpu(torch.empty(tensor.numel() // group.size)), async_op=later
    ),
    "run": lambda group, tensor, later: group.run(
        line(group.size), tensor.clone(), Adasum, async_op=later
    ),
    "all_to_all": lambda group, tensor, later: group.all_to_all(tensor, async_op=later),
    "request": lambda group, tensor, later: group.all_reduce_init(tensor.clone()).start(),
    "grouped request": lambda group, tensor, later: group.grouped_all_reduce_init(
        [tensor.clone()], Adasum
    ).start(),
}


@pytest.mark.parametrize("size", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CALLS)
def test_every_kind_of_call(kind: str, size: int) -> None:
    """On streams of its caller's that change, at once and later, with what nobody keeps."""

    def work(group: Group) -> None:
        for later in (True, False, True):
            tensor = mine(group, 6 * NUMEL)
            works = [CALLS[kind](group, tensor, True), CALLS[kind](group, tensor, later)]
            works.append(CALLS[kind](group, mine(group, 6 * NUMEL), True))
            for each in works:
                with torch.cuda.stream(Stream() if isinstance(each, Work) else None):
                    answer = each.wait() if isinstance(each, Work) else each
                    (answer[0] if isinstance(answer, tuple | list) else answer).mul(2.0)
            del answer, each, works, tensor
            machine.collect()

    assert run(work, size) == []


def test_the_tensors_device_counts_and_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def current_stream(device: torch.device | None = None) -> Stream:
        asked.append(device)
        return machine.current()

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    queue, tensor = Queue(), on_gpu(torch.zeros(3))
    assert queue.later(lambda: tensor, [tensor]).wait() is tensor
    queue.close()
    assert {*asked} == {streams.DEVICE}


def test_request_in_a_capture_runs_in_the_capturing_thread() -> None:
    """The graph takes what that thread's stream gets."""

    class Noted(SumReducer):
        def finish(self, buffer: torch.Tensor, size: int) -> None:
            threads.append(threading.current_thread())

    def work(group: Group) -> None:
        request = group.all_reduce_init(mine(group), Noted(), algorithm="rd")
        group.barrier()
        machine.capturing = True
        request.start()
        assert threading.current_thread() in threads
        group.barrier()
        machine.capturing = False
        request.wait()

    threads: list[threading.Thread] = []
    assert run(work) == []


def test_what_runs_on_the_host_is_refused_in_a_capture() -> None:
    """Before anything is sent, so that the group can be used on."""

    def work(group: Group) -> None:
        tensor = mine(group)
        group.all_reduce(tensor, algorithm="rd")
        group.barrier()
        machine.capturing = True
        with pytest.raises(ValueError, match=r"pscpu#2.* on the host.* CUDA graph.*: use psgpu"):
            group.all_reduce(tensor, algorithm="rd:16:pscpu#2")
        group.barrier()
        machine.capturing = False
        group.barrier()
        group.all_reduce(tensor, algorithm="psgpu")
        tensor.add_(1.0)

    assert run(work) == []


@pytest.mark.parametrize("algorithm", ["nccl", "nccl/xring", "rd:16:nccl", "collective"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_a_librarys_sum_cannot_take_is_refused_before_anything_is_sent(
    dtype: torch.dtype, algorithm: str
) -> None:
    """In the library it is an error that leaves the group unusable."""

    def work(group: Group) -> None:
        tensors = [mine(group), on_gpu(torch.zeros(NUMEL).to(dtype))]
        with pytest.raises(TypeError, match=f"{dtype}"):
            group.all_reduce(tensors[1], algorithm=algorithm)
        with pytest.raises((TypeError, ValueError), match=f"{dtype}|no process group"):
            group.grouped_all_reduce(tensors, algorithm=algorithm)
        group.all_reduce(tensors[0], algorithm="nccl")
        tensors[0].add_(1.0)

    assert run(work) == []


@pytest.mark.parametrize("name", ["nccl", "collective"])
def test_dtypes_that_a_librarys_sum_can_take(name: str) -> None:
    transport: Any = SimpleNamespace(sums_on_gpu=True, process_group=object())
    libraries = Libraries(transport)
    for dtype in (torch.bfloat16, torch.uint8, torch.int64, torch.complex64, torch.complex128):
        libraries.check(name, streams.DEVICE, dtype)
    for dtype in (torch.int16, torch.uint32, torch.bool, torch.float8_e5m2):
        with pytest.raises(TypeError, match=f"'{name}' .* cannot add {dtype}: use 'xring'"):
            libraries.check(name, streams.DEVICE, dtype)


def test_an_error_of_cudas_before_the_call_is_raised_by_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The communication thread goes on, so that nothing behind it waits for ever."""

    def fails(stream: Stream, event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    queue = Queue()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "wait_event", fails)
        work = queue.later(lambda: 1, [on_gpu(torch.ones(3))])
        with pytest.raises(RuntimeError, match="illegal memory access"):
            work.wait()
    assert queue.later(lambda: 2).wait() == 2
    queue.close()
