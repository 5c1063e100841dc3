"""Tensors in memory that a node's GPUs share, over ranks that are threads and memory that is RAM.

The kernels are tests/kernels/gpu/test_node_kernels.py's, and all of it runs on a GPU in
tests/processes/test_node_memory.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import collectives
import kernels
from adasum import AdasumReducer, reducer
from collectives import (
    Average,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    Max,
    Sum,
    calls,
)
from collectives.execution import node_launches
from collectives.reducers import NODE_RANKS
from collectives.transport import ThreadTransport, ThreadWorld
from collectives.transport.nccl import node_memory
from collectives.transport.nccl.node_memory import NodeMemory
from collectives.transport.nccl.transport import NcclTransport
from collectives.tree_order import in_order
from kernels.gpu import node_adasum, node_kernels
from kernels.gpu.node_slices import slice_of
from tests.adasum import definition
from tests.collectives.consistency.ranks import WithoutSharedMemory, run_over
from tests.collectives.transport.thread_ranks import TIMEOUT
from tests.fakes import fake_nccl
from tests.fakes.fake_cuda import device_tensor
from tests.fakes.nccl_machine import Machine, all_good, make_machine, told

EPS = torch.finfo(torch.float32).eps


class Node:
    """Reduces what lies at one place of all ranks' memory, where all call it at the same time."""

    def __init__(
        self,
        rank: int,
        memories: list[Tensor],
        tables: list[Tensor],
        barrier: threading.Barrier,
    ) -> None:
        self.rank, self.size, self._all = rank, barrier.parties, True
        self._memories, self._tables, self._barrier = memories, tables, barrier

    def slice(self, numel: int, itemsize: int) -> tuple[int, int]:
        return slice_of(numel, itemsize, self.size, self.rank)

    def scattering(self) -> Node:
        part = copy.copy(self)
        part._all = False
        return part

    def _put(self, offset: int, numel: int, dtype: torch.dtype, reduce: Any) -> None:
        self._barrier.wait(TIMEOUT)
        places = [each[offset:][: numel * dtype.itemsize].view(dtype) for each in self._memories]
        total = reduce(places).to(dtype)
        self._barrier.wait(TIMEOUT)
        start, length = (0, numel) if self._all else self.slice(numel, dtype.itemsize)
        places[self.rank][start : start + length] = total[start : start + length]

    def bind_sum(self, x: Tensor, offset: int) -> Callable[[float], None]:
        def launch(factor: float) -> None:
            def total(places: list[Tensor]) -> Tensor:
                return torch.stack(places).double().sum(0) * factor

            self._put(offset, x.numel(), x.dtype, total)

        return launch

    def bind_adasum(
        self, numel: int, dtype: torch.dtype, tree: Any, segments: Any, offset: int
    ) -> Callable[[], None]:
        def joined(places: list[Tensor]) -> Tensor:
            found = kernels.adasum_coefficients(kernels.gram(places, segments)[None], tree)
            return kernels.weighted_sum(places, found, segments)

        return lambda: self._put(offset, numel, dtype, joined)

    def bind_gather(self, numel: int, dtype: torch.dtype, offset: int) -> Callable[[], None]:
        def gathered(places: list[Tensor]) -> Tensor:
            slices = [slice_of(numel, dtype.itemsize, self.size, k) for k in range(self.size)]
            pairs = zip(places, slices, strict=True)
            return torch.cat([place[start : start + length] for place, (start, length) in pairs])

        return lambda: self._put(offset, numel, dtype, gathered)

    def add_up(self, table: Tensor) -> None:
        self._tables[self.rank] = table.clone()
        self._barrier.wait(TIMEOUT)
        total = torch.stack(self._tables).sum(0)
        self._barrier.wait(TIMEOUT)
        table.copy_(total)


class Sharing(ThreadTransport):
    """Whose ranks share what they call their GPUs' memory.

    Attributes:
        launches: The memories' numbers.
        devices: On which memory was asked for.
    """

    memories: dict[tuple[int, int], tuple[list[Tensor], list[Tensor], threading.Barrier]]
    lock = threading.Lock()

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.node_memories: list[NodeMemory] = []
        self.launches: list[int] = []
        self.devices: list[torch.device | None] = []

    def shares_gpu_memory(self, device: torch.device) -> bool:
        return True

    def add_node_memory(
        self, nbytes: int, device: torch.device | None, node: Any, process_group: Any, timeout: Any
    ) -> NodeMemory:
        self.devices.append(device)
        size, rank = len(node), self.rank - node[0]
        with self.lock:
            made = self.memories.setdefault(
                (len(self.node_memories), node[0]),
                ([torch.empty(0)] * size, [torch.empty(0)] * size, threading.Barrier(size)),
            )
        made[0][rank] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        # As the real one: all ranks have it when the call returns.
        made[2].wait(TIMEOUT)
        memory = NodeMemory.__new__(NodeMemory)
        memory.tensor = made[0][rank]
        memory.node = Node(rank, *made)  # type: ignore[assignment]
        self.node_memories.append(memory)
        return memory

    def launch(self, number: int, work: Any, tensors: Any, step: str, timeout: float) -> None:
        self.launches.append(number)
        work()


class SharingByMessages(Sharing, WithoutSharedMemory):
    """Whose ranks negotiate by messages."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call goes through the memory that ranks on CPUs share, or copies to that of GPUs."""
    monkeypatch.setenv("ADASUM_NODE_MEMORY", "0")
    monkeypatch.setattr(calls, "plan_host_all_reduce", lambda runner, call: None)
    monkeypatch.setattr(Sharing, "memories", {}, raising=False)


def run(
    size: int, job: Callable[[Group], Any], kind: type[Sharing] = Sharing, nodes: int = 1
) -> list[Sharing]:
    world, local = ThreadWorld(size), size // nodes
    ranks = [kind(world, rank) for rank in range(size)]

    run_over(ranks, job, TIMEOUT, local_size=local)
    return ranks


def terms(size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=made).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("kind", [Sharing, SharingByMessages])
@pytest.mark.parametrize("op", [Sum, Average], ids=str)
def test_tensor_in_it_is_one_launch_of_all_ranks(op, kind):
    size, numel = 3, 1000

    def job(group: Group) -> None:
        memory = group.symmetric_empty(3 * numel, torch.bfloat16)
        other = group.symmetric_empty(8)
        assert memory.shape == (3 * numel,)
        x = memory[64 : 64 + numel].view(10, 100)
        mine = terms(size, numel, torch.bfloat16)
        factor = 1.0 if op is Sum else 1 / size
        for asynchronous in (False, True):
            x.copy_(mine[group.rank].view(10, 100))
            version = x._version
            result = group.all_reduce(x, op, prescale=2.0, postscale=0.5, async_op=asynchronous)
            assert (result.wait() if asynchronous else result) is x
            assert x._version > version
            total = torch.stack([2 * each for each in mine]).double().sum(0) * factor
            assert torch.equal(x.view(-1), total.bfloat16() * 0.5)
        request = group.all_reduce_init(other, op)
        for turn in range(5):
            other.fill_(group.rank + turn)
            request.start()
            assert request.wait() is other
            wanted = torch.tensor((3.0 + 3 * turn) * factor, dtype=torch.float32)
            assert (other == wanted).all()

    for transport in run(size, job, kind):
        assert transport.launches == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("weighted", [True, False])
def test_adasum_has_the_groups_tree_segments_and_weights(weighted):
    size, numel = 3, 1000
    op = AdasumReducer(weighted=weighted)

    def job(group: Group) -> None:
        memory, bounds = group.symmetric_empty(numel + 8), [0, 10, 10, 700, numel]
        for x, segments in ((memory[8:], bounds), (memory[:numel], None)):
            mine = terms(size, numel, torch.float32, seed=1)
            x.copy_(mine[group.rank])
            group.all_reduce(x, op, segments=segments)
            exact = definition.tree(mine, segments, weighted=weighted)
            # One rounding of the blend, and of the coefficients in float64.
            assert (x.double() - exact).abs().max() <= 2 * EPS * exact.abs().max()
        # Whose matrices are asked for, and whose dtype takes pairs.
        group.all_reduce(memory[:numel], op.observed())
        group.all_reduce(torch.empty(8, dtype=torch.float64).copy_(memory[:8]), op)

    for transport in run(size, job):
        assert transport.launches == [0, 0]


def test_request_of_another_buffer_goes_where_that_lies():
    def job(group: Group) -> None:
        memory = group.symmetric_empty(16)
        inside, outside = memory[:8], torch.empty(8)
        request = group.all_reduce_init(outside)
        for buffer in (outside, inside, outside, inside):
            buffer.fill_(group.rank + 1.0)
            request.start(buffer)
            assert request.wait().tolist() == [3.0] * 8

    for transport in run(2, job):
        assert transport.launches == [0, 0]


def test_request_that_could_not_be_planned_leaves_its_old_buffer_alone():
    def job(group: Group) -> None:
        memory = group.symmetric_empty(16)
        old, new = memory[:8], memory[8:]
        request = group.all_reduce_init(old)
        place: Any = group.transport.node_memories[0]
        place.offset_of = None
        with pytest.raises(TypeError):
            request.start(new)
        old.fill_(1.0)
        new.fill_(2.0)
        request.start()
        assert request.wait().tolist() == [4.0] * 8
        assert old.tolist() == [1.0] * 8

    assert not any(transport.launches for transport in run(2, job))


def test_released_request_keeps_its_plan_but_no_memory():
    def job(group: Group) -> None:
        request = group.all_reduce_init(torch.empty(8))
        plan: Any = request._call.plan
        for _ in range(2):
            array = np.full(8, group.rank + 1, np.float32)
            freed = weakref.ref(array)
            request.start(torch.from_numpy(array))
            assert request._call.plan is plan
            assert request.wait().tolist() == [3.0] * 8
            request.release()
            del array
            group.barrier()
            gc.collect()
            assert freed() is None
        request.close()
        assert request._call.plan is None

    run(2, job)


def test_launch_is_bound_for_the_gpu_of_its_tensor(monkeypatch):
    at_binding: list[bool] = []

    @contextlib.contextmanager
    def on_device_of(tensor: Tensor) -> Iterator[None]:
        of_threads.current = tensor.data_ptr()
        yield
        of_threads.current = 0

    of_threads = threading.local()
    bind_sum = Node.bind_sum

    def bind(self: Node, x: Tensor, offset: int) -> Callable[[float], None]:
        at_binding.append(of_threads.current == x.data_ptr())
        return bind_sum(self, x, offset)

    monkeypatch.setattr(node_launches, "on_device_of", on_device_of)
    monkeypatch.setattr(Node, "bind_sum", bind)
    run(2, lambda group: group.all_reduce(group.symmetric_empty(8)))
    assert at_binding == [True, True]


def test_what_has_no_such_kernel_goes_by_messages():
    def job(group: Group) -> None:
        memory = group.symmetric_empty(100)
        apart = [memory[:4], memory[8:12]]
        for x, op, options, expected in (
            (memory[:4], Max, {}, 2.0),
            (memory[:4], in_order(Sum, "tree"), {}, 3.0),
            (memory[:4], Sum, {"order": "tree"}, 3.0),
            (memory[4:8], Sum, {"algorithm": "rd"}, 3.0),
            # Off a multiple of 16 bytes.
            (memory[9:13], Sum, {}, 3.0),
            (memory[:4].view(torch.int32), Sum, {}, 3),
            (torch.empty(4), Sum, {}, 3.0),
            # Beyond its end.
            (torch.empty(200), Sum, {}, 3.0),
        ):
            x.fill_(group.rank + 1)
            assert (group.all_reduce(x, op, **options) == expected).all()
        for tensors in (apart, [memory[:4], torch.empty(4, dtype=torch.float64)], [memory[:0]]):
            for each in tensors:
                each.fill_(group.rank + 1)
            for each in group.grouped_all_reduce(tensors):
                assert (each == 3.0).all()
        apart[0].fill_(group.rank + 1)
        group.grouped_all_reduce(apart[:1], algorithm="rd")
        assert apart[0].tolist() == [3.0] * 4
        assert group.all_reduce(memory[:0]).numel() == 0
        memory[:8].fill_(group.rank + 1)
        scattered = group.reduce_scatter(memory[:8])
        assert scattered.tolist() == [3.0] * 4

    assert not any(transport.launches for transport in run(2, job))


@pytest.mark.parametrize("kind", [Sharing, SharingByMessages])
def test_ranks_that_pass_other_places_learn_so_and_go_on(kind):
    def job(group: Group) -> None:
        memory = group.symmetric_empty(100)
        places = [memory[:8], memory[8:16], torch.empty(8)]
        for others in (1, 2):
            with pytest.raises(CollectiveMismatchError) as caught:
                group.all_reduce(places[0 if group.rank == 0 else others])
            assert "symmetric_memory=[0, 0]" in str(caught.value)
        memory[:8].fill_(1.0)
        assert group.all_reduce(memory[:8]).tolist() == [2.0] * 8

    for transport in run(2, job, kind):
        assert transport.launches == [0]


def test_memory_is_on_the_callers_gpu_whichever_thread_makes_it(monkeypatch):
    of_threads = threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # As CUDA has it: 0 in every new thread.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(of_threads, "device", 0))

    def job(group: Group) -> None:
        of_threads.device = group.rank + 1
        work = None
        if group.rank == 0:
            # The queue is not empty until rank 1 has come.
            work = group.all_reduce(torch.ones(4), async_op=True)
        else:
            time.sleep(0.2)
            group.all_reduce(torch.ones(4))
        group.symmetric_empty(8)
        if work is not None:
            work.wait()

    made = [transport.devices for transport in run(2, job)]
    assert made == [[torch.device("cuda", 1)], [torch.device("cuda", 2)]]


def test_group_that_can_have_none_says_what_it_needs():
    def work(group: Group) -> None:
        with pytest.raises(ValueError, match="symmetric memory needs NCCL"):
            group.symmetric_empty(8)
        with pytest.raises(ValueError, match="numel"):
            group.symmetric_empty(-1)
        with pytest.raises(TypeError, match="dtype must be float16"):
            group.symmetric_empty(8, torch.int32)

    collectives.run_threads(2, work)


def test_limits_that_are_checked_before_a_call_are_those_of_the_kernels():
    """Which are not imported where no GPU is used."""
    assert NODE_RANKS == node_kernels.MAX_RANKS
    assert reducer._NODE_RANKS == node_adasum.MAX_RANKS


class ProcessGroup:
    """What a rank's memory is asked of."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def add_memory(transport: NcclTransport, timeout: float) -> NodeMemory:
    group: Any = ProcessGroup(transport.rank, 2)
    return transport.add_node_memory(64, torch.device("cuda", 0), (0, 1), group, timeout)


class Failing:
    """A node whose launches take a while and find that a rank has not come."""

    def __init__(self, rank: int, buffers: Any, pads: Any, device: Any, timeout: float) -> None:
        assert [a - b for a, b in zip(buffers, pads, strict=True)] == [buffers[0] - pads[0]] * 2
        self.rank, self.failed, self.given_up = rank, False, threading.Event()

    def check(self, names: Any) -> None:
        if self.failed:
            raise TimeoutError(f"rank {names[self.rank]} waited")

    def give_up(self) -> None:
        self.given_up.set()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for made in make_machine(monkeypatch, fake_nccl.FakeNccl()):
        monkeypatch.setattr(node_memory, "cuda", made.cuda)
        yield made


@pytest.fixture
def torchs(machine, monkeypatch) -> SimpleNamespace:
    """torch's symmetric memory, as node_memory gets it, on one rank of two with large GPUs.

    It has nothing that takes memory from torch's pool: a block of there keeps its rendezvous, while
    another rank may hold the old tensor and wait for a new one.
    """
    memory = SimpleNamespace(
        empty_strided_p2p=lambda size, *_: torch.full(size, 0xFF, dtype=torch.uint8),
        rendezvous=lambda block, name: SimpleNamespace(
            rank=0, buffer_ptrs=[block.data_ptr(), 4096]
        ),
    )
    properties = SimpleNamespace(multi_processor_count=132, uuid="gpu-0")
    monkeypatch.setattr(node_memory, "_symmetric_memory", lambda: memory)
    monkeypatch.setattr(machine.cuda, "get_device_properties", lambda _: properties, raising=False)
    monkeypatch.setattr(node_memory, "_has_native_atomics", lambda source, target: True)
    return SimpleNamespace(memory=memory, properties=properties)


def allocate(
    gather: Callable[[Any], list[Any]] = lambda said: [said] * 2, node: Any = range(2)
) -> Any:
    group: Any = SimpleNamespace(group_name="0")
    return node_memory.allocate(64, 16, group, torch.device("cuda", 0), gather, node)


def test_rank_without_memory_is_told_to_all_before_torch_waits_for_it(torchs):
    def empty(*_: Any) -> Tensor:
        raise RuntimeError("CUDA out of memory\nits C++ stack")

    torchs.memory.empty_strided_p2p, torchs.memory.rendezvous = empty, None
    with pytest.raises(collectives.TransportError, match=r"rank 1: CUDA out of memory$"):
        allocate(lambda said: [["", *said[1:]], said])


def test_memory_inside_of_a_larger_block_is_found_there(torchs):
    """torch returns the addresses of the blocks, and may place memory inside of them."""
    block = torch.full((96,), 0xFF, dtype=torch.uint8)
    handle = SimpleNamespace(rank=1, buffer_ptrs=[4096, block.data_ptr()])
    torchs.memory.empty_strided_p2p = lambda *_: block[32:]
    torchs.memory.rendezvous = lambda *_: handle
    made, addresses = allocate()
    assert made.nbytes == 64 and addresses == [4128, made.data_ptr()]
    assert made.tolist() == [0] * 16 + [0xFF] * 48


def test_gpu_that_cannot_hold_all_programs_is_a_reason_on_all_ranks(torchs):
    torchs.properties.multi_processor_count = 31
    with pytest.raises(collectives.TransportError, match=r"rank 1: cuda:0 has 31 .* need 32"):
        allocate()


def test_gpus_without_native_atomics_or_on_several_hosts_are_a_reason(torchs, monkeypatch):
    asked = []

    def has(source: int, target: int) -> bool:
        asked.append((source, target))
        return (source, target) != (2, 1)

    monkeypatch.setattr(node_memory, "_has_native_atomics", has)
    with pytest.raises(collectives.TransportError, match=r"cuda:2 has no native atomics .* cuda:1"):
        allocate(lambda said: [[*said[:2], k, str(k)] for k in (0, 1, 2)], range(3))
    assert asked == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    with pytest.raises(collectives.TransportError, match="several hosts"):
        allocate(lambda said: [said, [said[0], "another", 0, "gpu-1"]])
    # Each rank sees its own GPU only.
    with pytest.raises(collectives.TransportError, match="different GPUs by one number"):
        allocate(lambda said: [said, [*said[:3], "gpu-1"]])


def test_memory_is_among_the_ranks_of_a_node_and_its_lack_is_told_to_all(torchs):
    def gather(said: Any) -> list[Any]:
        turns.append(said)
        lack = "too far" if len(turns) == failing else ""
        return [said, said, *[[lack, f"host {k // 2}", k % 2, str(k)] for k in (2, 3)]]

    turns: list[Any] = []
    failing = 0
    assert allocate(gather, (0, 1))[0].nbytes == 64
    failing = len(turns) + 2
    with pytest.raises(collectives.TransportError, match="rank 2, rank 3: too far"):
        allocate(gather, (0, 1))


def test_rank_whose_rendezvous_fails_is_told_to_all(torchs):
    def gather(said: Any) -> list[Any]:
        turns.append(said)
        return [said, ["the import failed", *said[1:]] if len(turns) == 3 else said]

    turns: list[Any] = []
    with pytest.raises(collectives.TransportError, match="rank 1: the import failed"):
        allocate(gather)


@pytest.fixture
def failing(machine, monkeypatch) -> None:
    """Memory whose launches are those of `Failing`."""
    memory = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
    monkeypatch.setattr(
        node_memory, "allocate", lambda nbytes, *args: (device_tensor(memory[:nbytes]), [4096] * 2)
    )
    monkeypatch.setattr(node_memory, "Node", Failing)


@pytest.mark.usefixtures("failing")
def test_launch_that_is_late_is_ended_though_no_call_follows(machine):
    def work(transport: NcclTransport) -> bool:
        node: Any = add_memory(transport, 20.0).node
        ended: list[bool] = []

        def spin() -> None:
            ended.append(node.given_up.wait(20.0))

        x = device_tensor(torch.zeros(4))
        transport.launch(0, lambda: machine.put(spin), [x], "a step", 0.3)
        machine.cuda.current_stream().synchronize()
        assert isinstance(told(transport.check_streams), CollectiveTimeoutError)
        return ended[0]

    assert all_good(machine.run(2, work)) == [True] * 2


@pytest.mark.usefixtures("failing")
def test_launch_follows_the_stream_and_its_failure_is_told_without_a_wait(machine):
    def work(transport: NcclTransport) -> str:
        made = add_memory(transport, 5.0)
        assert made.tensor.nbytes == 64
        x, order = device_tensor(torch.zeros(4)), []
        machine.put(lambda: order.append("before"), 0.2)

        def launch() -> None:
            machine.put(lambda: order.append("launch"), 0.2)

        transport.launch(0, launch, [x], "a step", 5.0)
        machine.put(lambda: order.append("behind"))
        assert not order
        machine.cuda.current_stream().synchronize()
        assert order == ["before", "launch", "behind"]
        transport.check_streams()
        node: Any = made.node
        fail = partial(setattr, node, "failed", True)
        transport.launch(0, lambda: machine.put(fail), [x], "a step", 5.0)
        machine.cuda.current_stream().synchronize()
        error = told(transport.check_streams)
        assert isinstance(error, CollectiveTimeoutError)
        with pytest.raises(CollectiveTimeoutError):
            transport.launch(0, launch, [x], "the next step", 5.0)
        return str(error)

    expected = [f"rank {rank} waited" for rank in (0, 1)]
    assert all_good(machine.run(2, work)) == expected
