"""Start-up: under torchrun's variables, alone, and beside torch.distributed."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

import adasum
import collectives
from tests.collectives.queues import hold
from tests.processes.harness import free_port, on_one_node, run_ranks

PLACE = on_one_node(0, 2, 29500)


def _adopt(rank: int) -> list[float]:
    """torch.distributed is there already; a subgroup of it works too, and is left alive."""
    dist.init_process_group("gloo")
    group = collectives.init(timeout=30.0)
    assert collectives.init() is group
    value = torch.tensor(float(rank))
    group.all_reduce(value)
    collectives.shutdown()
    assert dist.is_initialized()
    part = dist.new_group([0, 2])
    results = [value.item()]
    if rank != 1:
        pair = collectives.init(process_group=part, timeout=30.0)
        assert (pair.rank, pair.size) == (rank // 2, 2)
        assert (pair.local_rank, pair.local_size) == (rank // 2, 2)
        value = torch.tensor(float(rank))
        results.append(pair.all_reduce(value).item())
        collectives.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_torch_distributed_is_adopted() -> None:
    assert run_ranks(3, _adopt) == [[3.0, 2.0], [3.0], [3.0, 2.0]]


def _ended_first(rank: int, port: int) -> list[float]:
    """The user ends torch.distributed, and starts it again: shutdown leaves that one alone."""
    group = collectives.init(timeout=20.0)
    dist.destroy_process_group()
    total = group.all_reduce(torch.ones(1)).item()
    # The first to fail tells the other, which may not have seen yet that both are there.
    with pytest.raises(collectives.CollectiveError, match="destroyed"):
        group.split([0, 1])
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    collectives.shutdown()
    theirs = torch.ones(1)
    dist.all_reduce(theirs)
    dist.barrier()
    dist.destroy_process_group()
    return [total, theirs.item()]


def test_torch_distributed_ended_first() -> None:
    assert run_ranks(2, _ended_first, free_port(), timeout=60.0) == [[2.0, 2.0]] * 2


def _forked(rank: int, transport: str) -> list[bytes]:
    group = collectives.init(timeout=20.0, transport=transport)
    done = group.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    request = group.all_reduce_init(torch.ones(1))
    # What is under way at the fork.
    gate = hold(group)
    work = group.all_reduce(torch.ones(1), async_op=True)
    request.start()
    handle = adasum.allreduce_async(torch.ones(1), op=adasum.Sum)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A hang would end with the test's pipe.
        signal.alarm(10)
        for call in (
            lambda: group.all_reduce(torch.ones(1)),
            lambda: group.all_reduce(torch.ones(1), async_op=True),
            work.wait,
            work.is_completed,
            lambda: work.add_done_callback(lambda: None),
            request.wait,
            request.is_completed,
            request.start,
            lambda: adasum.synchronize(handle),
            lambda: adasum.poll(handle),
        ):
            try:
                call()
            except (collectives.TransportError, RuntimeError) as error:
                os.write(writing, f"{error}\n".encode())
        assert done.wait().item() == 2.0
        group.close()
        os.write(writing, b"closed\n")
        os._exit(0)
    gate.set()
    assert work.wait().item() == request.wait().item() == handle.wait().item() == 2.0
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    collectives.shutdown()
    return said


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_forked_child_is_told(transport: str) -> None:
    """An asynchronous call waited without an end for a thread that the child does not have."""
    for said in run_ranks(2, _forked, transport, timeout=60.0):
        assert said.pop() == b"closed"
        started = said.pop(7)
        assert b"was started already" in started
        assert len(said) == 9 and all(b"forked from a rank" in line for line in said), said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be an integer .*got 'two' of '2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({**PLACE, "MASTER_PORT": "x"}, "MASTER_PORT must be a port from 1 to 65535, got 'x'"),
        ({**PLACE, "MASTER_PORT": "70000"}, "MASTER_PORT must be a port from 1 to 65535"),
        ({**PLACE, "LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer .*got 'x' of '2'"),
        ({**PLACE, "LOCAL_RANK": "2"}, "from 0 to LOCAL_WORLD_SIZE - 1, got '2' of '2'"),
        ({**PLACE, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE - 1, got '0' of '0'"),
        ({"ADASUM_TRANSPORT": "mpi"}, "ADASUM_TRANSPORT must be one of .*, nccl, got 'mpi'"),
    ],
)
def test_incomplete_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        collectives.init()
