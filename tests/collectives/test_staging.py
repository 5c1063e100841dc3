"""All-reduces of tensors anywhere, copied to memory that a node's GPUs share: one launch each.

Over the stand-ins of test_symmetric_memory.py; on a GPU in tests/processes/test_node_memory.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import adasum
import collectives
from adasum import AdasumReducer
from bench.collectives import host_cost
from collectives import Average, BackendOptions, Group, Max, Sum, calls
from collectives.backend import AdasumProcessGroup
from collectives.execution import all_reduce
from collectives.initialize import _thread
from collectives.transport import ThreadWorld
from tests.adasum import definition
from tests.collectives import test_symmetric_memory as in_memory
from tests.collectives.test_symmetric_memory import EPS, Sharing, run, terms

SIZE = 8


class Counting(Sharing):
    """Counts the exchanges of messages; set to 0 by what has others before."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.exchanges = 0

    def exchange(self, *args: Any) -> None:
        self.exchanges += 1
        super().exchange(*args)


class Refusing(Counting):
    """Whose ranks have no such memory."""

    def add_node_memory(self, nbytes: int, device: Any, *args: Any) -> Any:
        self.devices.append(device)
        raise collectives.TransportError("the GPUs are far away")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call goes through the memory that ranks on CPUs share; that of GPUs takes 1 MiB."""
    monkeypatch.setattr(calls, "plan_host_all_reduce", lambda runner, call: None)
    monkeypatch.setattr(Sharing, "memories", {}, raising=False)
    monkeypatch.setenv("ADASUM_NODE_MEMORY", "1")


@pytest.mark.parametrize(
    ("nodes", "local", "op", "launches", "exchanges"),
    [
        (1, 3, Sum, 1, 0),
        (1, 3, Average, 1, 0),
        (1, 3, AdasumReducer(), 1, 0),
        # A launch in each node before and behind the messages of the slices; one adds up Adasum's
        # dot products, of which each node holds all.
        (2, 8, Sum, 2, 1),
        (2, 8, Average, 2, 1),
        (2, 8, AdasumReducer(), 3, 1),
        (2, 4, AdasumReducer(weighted=False), 3, 1),
        (4, 2, Average, 2, 2),
        # There and back, and in between the tables of Gram matrices.
        (3, 2, AdasumReducer(), 2, 3),
        (2, 3, Sum, 2, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tensor_anywhere_is_a_launch_in_each_node_and_slices_between_two(
    nodes, local, op, launches, exchanges, dtype, monkeypatch
):
    size, numel, bounds = nodes * local, 1001, [0, 10, 700, 701, 1001]
    monkeypatch.setattr(in_memory, "TIMEOUT", 60.0)
    results = [torch.empty(0)] * size

    def job(group: Group) -> None:
        assert group.num_nodes == nodes
        mine = terms(size, numel, dtype)
        options: Any = {"segments": bounds, "prescale": 2.0, "postscale": 0.5}
        x = torch.empty(7, 143, dtype=dtype)
        request = group.all_reduce_init(x, op, **options)
        for turn in range(3):
            x.copy_(mine[group.rank].view(7, 143))
            if turn == 0:
                assert group.all_reduce(x, op, **options) is x
            else:
                before = group.transport.exchanges
                request.start()
                assert request.wait() is x
                assert group.transport.exchanges - before == exchanges
            if isinstance(op, AdasumReducer):
                exact = definition.tree([2 * one for one in mine], bounds, weighted=op.weighted) / 2
            else:
                exact = torch.stack(mine).double().sum(0) / (size if op is Average else 1)
            # A rounding of each node's results, of what joins them, and of an average's division;
            # what each is off by is weighed by the coefficients, of about 1.
            scale = torch.stack(mine).double().abs().max() * (size if op is Sum else 1)
            error = (x.view(-1).double() - exact).abs().max()
            assert error <= 2 * (nodes + 1) * torch.finfo(dtype).eps * scale
        results[group.rank] = x

    for transport in run(size, job, Counting, nodes):
        assert transport.launches == [0] * (3 * launches)
    assert all(torch.equal(each, results[0]) for each in results)


def test_of_several_nodes_what_is_no_branch_of_the_tree_goes_by_messages():
    def job(group: Group) -> None:
        mine = terms(6, 100, torch.float32)
        x = mine[group.rank].clone()
        group.all_reduce(x, adasum.Adasum)
        exact = definition.tree(mine, None)
        assert (x.double() - exact).abs().max() <= 2 * EPS * exact.abs().max()

    for transport in run(6, job, Counting, 2):
        assert not transport.launches


def test_tensors_apart_are_packed_into_it():
    def job(group: Group) -> None:
        tensors = [torch.full((n,), group.rank + 1.0) for n in (3, 100, 0, 65)]
        request = group.grouped_all_reduce_init(tensors)
        for _ in range(2):
            for each in tensors:
                each.fill_(group.rank + 1.0)
            request.start()
            request.wait()
            assert all((each == 3.0).all() for each in tensors)

    for transport in run(2, job):
        assert transport.launches == [0, 0]


def test_what_has_no_kernel_or_is_too_long_goes_by_messages(monkeypatch):
    def job(group: Group) -> None:
        long = torch.ones((1 << 18) + 1)
        assert (group.all_reduce(long) == 2).all()
        assert group.all_reduce(torch.ones(4), Max).tolist() == [1.0] * 4

    for transport in run(2, job):
        assert not transport.launches
        assert not transport.devices
    monkeypatch.setenv("ADASUM_NODE_MEMORY", "0")
    for transport in run(2, lambda group: group.all_reduce(torch.ones(4))):
        assert not transport.launches
    monkeypatch.setenv("ADASUM_NODE_MEMORY", "much")
    with pytest.raises(ValueError, match="ADASUM_NODE_MEMORY must be a number of MiB, got 'much'"):
        all_reduce.staging_bytes()


def test_ranks_without_it_go_by_messages_and_say_why_once(caplog):
    caplog.set_level(logging.INFO, "collectives")

    def job(group: Group) -> None:
        x = torch.empty(100)
        request = group.all_reduce_init(x)
        for _ in range(3):
            x.fill_(1.0)
            request.start()
            assert request.wait().tolist() == [2.0] * 100
        assert group.all_reduce(x).tolist() == [4.0] * 100

    for transport in run(2, job, Refusing):
        assert not transport.launches
        assert len(transport.devices) == 1
    said = "all-reduces on cpu have no 1048576 bytes of symmetric memory: the GPUs are far away"
    assert [each.getMessage() for each in caplog.records].count(said) == 2


def test_it_is_not_made_while_a_rank_has_joined():
    def job(group: Group) -> None:
        if group.rank == 0:
            assert group.all_reduce(torch.ones(4)).tolist() == [1.0] * 4
        group.join()
        assert not group.transport.node_memories
        assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4

    for transport in run(2, job):
        assert transport.launches == [0]


def test_ranks_may_plan_before_and_after_it_is_made():
    """A plan depends on the call alone, for ranks make theirs at different times."""

    def job(group: Group) -> None:
        first = torch.ones(4)
        works = [group.all_reduce(first, async_op=True)] if group.rank == 0 else []
        if group.rank == 1:
            group.all_reduce(first)
        later = torch.ones(4)
        works.append(group.all_reduce(later, async_op=True))
        for work in works:
            work.wait()
        assert first.tolist() == later.tolist() == [2.0] * 4

    for transport in run(2, job):
        assert transport.launches == [0, 0]


def test_observed_adasum_keeps_its_gram_matrices():
    def job(group: Group) -> None:
        assert not group.reduces_by_tree(torch.ones(4), adasum.Adasum)
        names = "before_reduction", "after_reduction", "after_gram"
        observer: Any = SimpleNamespace(**dict.fromkeys(names, print))
        assert adasum.reducer.gives_gram(observer, adasum.Adasum, group, torch.ones(4))

    run(3, job)


@pytest.mark.parametrize("op", [Average, adasum.Adasum], ids=str)
def test_default_optimizer_on_8_ranks_makes_one_launch_a_bucket_and_no_message(op):
    results: list[Tensor] = [torch.empty(0)] * SIZE

    def job(group: Group) -> None:
        _thread.group = group
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
        optimizer = adasum.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op
        )
        inputs = torch.Generator().manual_seed(group.rank)
        # The first step compares parameters, by messages.
        for step in range(3):
            before = group.transport.exchanges, len(group.transport.launches)
            optimizer.zero_grad()
            model(torch.randn(5, 16, generator=inputs)).square().mean().backward()
            optimizer.step()
            if step:
                now = group.transport.exchanges, len(group.transport.launches)
                # The model is one bucket.
                assert now == (before[0], before[1] + 1)
        results[group.rank] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        _thread.group = None
        sizes.append([each.tensor.nbytes for each in group.transport.node_memories])

    sizes: list[list[int]] = []
    for transport in run(SIZE, job, Counting):
        assert set(transport.launches) == {0}
    assert all(torch.equal(each, results[0]) for each in results)
    # Gradients are packed where they are reduced; by the delta method they are copied there.
    assert all((each == [1 << 20]) is (op is adasum.Adasum) for each in sizes)


@pytest.mark.parametrize("late", [0, 1])
def test_bucket_that_was_packed_while_a_rank_had_joined_is_placed_with_its(late):
    results: list[Tensor] = [torch.empty(0)] * 2

    def job(group: Group) -> None:
        _thread.group = group
        model = torch.nn.Linear(3, 2)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = adasum.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((1, 3), group.rank + 1.0)).sum().backward()
            optimizer.step()

        if group.rank != late:
            step()
        group.join()
        adasum.broadcast_parameters(dict(model.named_parameters()), 1 - late)
        launches = len(group.transport.launches)
        for _ in range(2):
            step()
        assert len(group.transport.launches) == launches + 2
        results[group.rank] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        _thread.group = None

    run(2, job)
    assert torch.equal(*results)


def test_ddp_hook_on_8_ranks_makes_one_launch_a_bucket_and_no_message(monkeypatch):
    shapes = [(4, 5), (7,), ()]
    bound: list[int] = []
    bind_adasum = in_memory.Node.bind_adasum

    def bind(self: in_memory.Node, *args: Any, **options: Any) -> Any:
        bound.append(self.rank)
        return bind_adasum(self, *args, **options)

    monkeypatch.setattr(in_memory.Node, "bind_adasum", bind)

    def job(group: Group) -> None:
        state = adasum.HookState(adasum.Adasum, process_group=group)
        before = group.transport.exchanges
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        mine = terms(SIZE, 28, torch.float32)
        for _ in range(3):
            # DDP may make its buckets anew.
            buffer = mine[group.rank].clone()
            bucket: Any = SimpleNamespace(
                index=lambda: 0, buffer=lambda buffer=buffer: buffer, parameters=lambda: parameters
            )
            result = adasum.ddp_hook(state, bucket).value()
            exact = definition.tree(mine, [0, 20, 27, 28])
            assert (result.double() - exact).abs().max() <= 2 * EPS * exact.abs().max()
        assert group.transport.exchanges == before

    for transport in run(SIZE, job, Counting):
        assert transport.launches == [0, 0, 0]
    # Whatever buffer it is of, a bucket's launch is bound once.
    assert sorted(bound) == [*range(SIZE)]


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM], ids=str)
def test_backend_on_8_ranks_makes_one_launch_a_bucket_and_no_message(op):
    """What DDP without a hook, FSDP2 and `dist.all_reduce` call."""

    def job(group: Group) -> None:
        backend = AdasumProcessGroup.__new__(AdasumProcessGroup)
        backend.adasum_options, backend._made = BackendOptions(), group
        backend._own_devices, backend._kept = frozenset({"cpu"}), deque()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        before = group.transport.exchanges
        for step in range(3):
            bucket = torch.full((1000,), group.rank + step + 0.0)
            backend.allreduce([bucket], options).wait()
            total = (sum(range(SIZE)) + SIZE * step) / (SIZE if op == dist.ReduceOp.AVG else 1)
            assert bucket.tolist() == [total] * 1000
        assert group.transport.exchanges == before

    for transport in run(SIZE, job, Counting):
        assert transport.launches == [0, 0, 0]


@pytest.mark.timing
@pytest.mark.parametrize(
    ("measure", "most"), [(host_cost.hook_of_a_bucket, 67), (host_cost.start_of_a_request, 36)]
)
def test_host_takes_few_microseconds(measure: Callable[[], float], most: int) -> None:
    """45 and, of `ASSUMED.launch`, 22 us on a host of 2 cores; half as much again for others."""
    assert measure() <= most
