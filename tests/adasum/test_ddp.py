"""The hooks for DistributedDataParallel and FSDP2, between real processes over gloo."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
import torch.distributed as dist

import adasum as hvd
from adasum.ddp import HookState, ddp_hook
from tests.adasum import fsdp_jobs
from tests.adasum.ddp_jobs import ddp_job, selected
from tests.adasum.fsdp_jobs import fsdp_job
from tests.adasum.jobs import on_ranks
from tests.processes.harness import run_ranks


def job(rank: int, replicas: int, shards: int) -> tuple[list[str], list[str]]:
    """Run both hooks' checks in one start of processes, which costs seconds."""
    return ddp_job(rank, replicas * shards), fsdp_job(rank, replicas, shards)


def fsdp_alone(rank: int, replicas: int, shards: int) -> list[str]:
    dist.init_process_group("gloo")
    return fsdp_job(rank, replicas, shards)


def test_ddp_on_two_ranks_equals_the_definition() -> None:
    names = [check.__name__ for check in selected(2)]
    assert run_ranks(2, ddp_job, 2, timeout=150.0) == [names] * 2


def test_fsdp_on_two_replicas_of_two_shards_equals_the_definition() -> None:
    names = [check.__name__ for check in fsdp_jobs.CHECKS]
    assert run_ranks(4, fsdp_alone, 2, 2, timeout=150.0) == [names] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (3, 1), (2, 2)])
def test_ddp_and_fsdp_in_processes_equal_the_definition(replicas: int, shards: int) -> None:
    size = replicas * shards
    names = (
        [check.__name__ for check in selected(size)],
        [check.__name__ for check in fsdp_jobs.CHECKS],
    )
    assert run_ranks(size, job, replicas, shards, timeout=150.0) == [names] * size


def test_hook_called_with_single_gradients_raises_and_says_what_to_set():
    gradient = torch.zeros(2)
    with pytest.raises(NotImplementedError, match="set it to 'ddp_optimizer'"):
        ddp_hook(HookState(), (gradient, torch.nn.Parameter(gradient)))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"op": "Adasum"}, TypeError, "op must be Sum, Average or Adasum"),
        ({"algorithm": "bogus"}, ValueError, "bogus"),
        ({"timeout": 0.0}, ValueError, "timeout must be a positive number"),
        ({"process_group": 3}, TypeError, "process_group must be .*ProcessGroup .*, got int"),
        ({"check_parameters": 1}, TypeError, "check_parameters must be a bool"),
        ({"compression": 3}, TypeError, r"fp16_compress_wrapper.*register_fsdp_hook\(wire_dtype"),
        ({"process_set": 3}, TypeError, "pass process_group="),
        ({"colour": 3}, TypeError, "has no argument 'colour'$"),
        ({"order": "tree", "algorithm": "rd:16k:xring"}, ValueError, "'xring' cannot.*use rechd"),
        ({"observer": 3}, TypeError, "observer must have before_reduction and after_reduction"),
    ],
)
def test_hook_state_with_a_bad_argument_raises_and_names_it(options, error, match):
    with pytest.raises(error, match=match):
        HookState(**options)


def test_hook_without_ranks_raises_and_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"call adasum.init\(\)"):
        _ = HookState().group


@on_ranks(1)
def test_pickled_hook_state_leaves_out_the_process_group_and_warns(group, caplog):
    state = HookState(op=hvd.Adasum, algorithm="rd", process_group=group)
    assert state.group is group
    with caplog.at_level(logging.WARNING):
        again = pickle.loads(pickle.dumps(state))
    assert "process_group cannot be pickled" in caplog.text
    assert again.process_group is None
    assert (repr(again.op), again.algorithm, again.timeout) == ("Adasum", "rd", state.timeout)
    again.process_group = group
    again.start(torch.ones(2), again.name_of(torch.ones(2)), [0, 2]).wait()


def test_hook_state_numbers_the_parameters_without_names_of_models_in_turn():
    given = torch.zeros(2, 3)
    state = HookState(named_parameters=[("weight", given)])
    names = []
    for _ in range(3):
        # CPython gives a new parameter the identity of a dropped one.
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))
        names += [state.name_of(parameter) for parameter in model.parameters()]
    shapes = [(2, 2), (2,), (3, 3), (3,)] * 3
    assert names == [f"parameter {i} {shape}" for i, shape in enumerate(shapes, 1)]
    assert state.name_of(given) == "weight"
