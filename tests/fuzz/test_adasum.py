"""Every function of `adasum` on two ranks that are threads, as test_group does it."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adasum
from adasum import (
    Adasum,
    AdasumReducer,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
)
from tests.fuzz.outcome import SETTINGS
from tests.fuzz.test_group import alike, recipes, unlike
from tests.fuzz.values import ODD_VALUES, Arg, Look, constant, sometimes, tensor, tensors, value

Strategy = st.SearchStrategy[Arg]
REJECTIONS = (TypeError, ValueError, NotImplementedError)

# Exceptions, constants and plain data.
DATA = {
    "Adasum",
    "AdasumReducer",
    "Average",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Compression",
    "Max",
    "Min",
    "OptimizerOrderError",
    "Product",
    "Sum",
    "TransportError",
}
# They take no argument, or are fuzzed in tests/fuzz/test_start.py.
NO_ARGUMENT = {
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "stop_timeline",
}
START = {
    "DistributedOptimizer",
    "GradientRecorder",
    "HookState",
    "ProcessSet",
    "ddp_hook",
    "init",
    "orthogonality",
    "register_fsdp_hook",
}


@functools.lru_cache(maxsize=256)
def _signatures(look: Look) -> dict[str, tuple[list[Strategy], dict[str, Strategy]]]:
    """What each takes: positional arguments, and keywords that may be left out."""
    a, many = tensor(look), tensors(look)
    named = {"name": value(None, "gradient"), "process_set": value(None, adasum.global_process_set)}
    op = {"op": value(Sum, Average, Adasum, AdasumReducer(weighted=False), Max, Min, Product, None)}
    compression = {"compression": value(Compression.none, Compression.fp16, Compression.bf16)}
    scales = {"prescale_factor": value(1.0, 0.5, 2), "postscale_factor": value(1.0, -1.0)}
    scales |= {"order": value(None, None, "tree", "line"), "accumulate": value(None, torch.float32)}
    average = {"average": value(None, None, None, True, False)}
    reduction = {**op, **named, **scales, **average}
    root = value(0, 1)
    counts = sometimes(
        st.sampled_from([constant(each) for each in ODD_VALUES]),
        st.lists(st.integers(-1, 4), min_size=1, max_size=3).map(constant)
        | value(None, torch.tensor([1, 1]), torch.tensor([1.0, 1.0])),
        4,
    )
    sparse = Arg("<sparse>", lambda memory: memory.add(torch.eye(2, 3).to_sparse()))
    objects = value(None, 1, "a", [1, {"a": 2.0}], (1, None), torch.ones(3), {1: {2, 3}})
    params = many | st.just(
        Arg("<state_dict>", lambda memory: torch.nn.Linear(2, 2, bias=False).state_dict())
    )
    optimizer = Arg(
        "<SGD>", lambda memory: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), momentum=0.9)
    )
    handle = Arg("<handle>", lambda memory: adasum.allreduce_async(torch.ones(3)))
    return {
        "add_process_set": ([value([0], [0, 1], ProcessSet([1]), [2], [0, 0], [-1], [])], {}),
        "allgather": ([a], named),
        "allgather_async": ([a], named),
        "allgather_object": ([objects], named),
        "allreduce": ([a], {**reduction, **compression}),
        "allreduce_": ([a], reduction),
        "allreduce_async": ([a], reduction),
        "allreduce_async_": ([a], reduction),
        "alltoall": ([a], {"splits": counts, **named}),
        "alltoall_async": ([a], {"splits": counts, **named}),
        "bits_of": ([sometimes(value(None), st.just(optimizer), 2)], {}),
        "barrier": ([], {"process_set": named["process_set"]}),
        "broadcast": ([a, root], named),
        "broadcast_": ([a, root], named),
        "broadcast_async": ([a, root], named),
        "broadcast_async_": ([a, root], named),
        "broadcast_object": ([objects], {"root_rank": root, **named}),
        "broadcast_optimizer_state": (
            [sometimes(value(None), st.just(optimizer), 3), root],
            {"process_set": named["process_set"]},
        ),
        "broadcast_parameters": ([params, root], {"process_set": named["process_set"]}),
        "grouped_allgather": ([many], named),
        "grouped_allgather_async": ([many], named),
        "grouped_allreduce": ([many], {**reduction, **compression}),
        "grouped_allreduce_": ([many], reduction),
        "grouped_allreduce_async": ([many], reduction),
        "grouped_allreduce_async_": ([many], reduction),
        "grouped_reducescatter": ([many], {**op, **named, **compression, **scales}),
        "grouped_reducescatter_async": ([many], {**op, **named, **scales}),
        "join": ([], {"device": value(-1, -2)}),
        "poll": ([sometimes(value(None), st.just(handle), 2)], {}),
        "process_set_by_id": ([value(0, 1, -1)], {}),
        "reducescatter": ([a], {**op, **named, **compression, **scales}),
        "reducescatter_async": ([a], {**op, **named, **scales}),
        "remove_process_set": ([value(adasum.global_process_set, ProcessSet([1]))], {}),
        "sparse_allreduce_async": (
            [sometimes(a, st.just(sparse), 3), value("embedding"), value(Sum, Average)],
            {"process_set": named["process_set"]},
        ),
        # None that a file can be made of: it would be the whole process's.
        "start_timeline": ([value("{rank}\0", b"bytes", 3)], {"mark_cycles": value(True, 1)}),
        "synchronize": ([sometimes(value(None), st.just(handle), 2)], {}),
    }


NAMES = sorted(_signatures(Look((6,), torch.float32)))
WRITES = ("_", "_parameters", "_optimizer_state")


def test_public_names_of_adasum_are_all_fuzzed() -> None:
    assert {*NAMES, *DATA, *NO_ARGUMENT, *START} == set(adasum.__all__)


def check(name: str, data: st.DataObject) -> None:
    """One call on both ranks, the same one or two."""
    strategy = recipes(adasum, _signatures, name)
    recipe = data.draw(strategy)
    reads_only = not name.endswith(WRITES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if data.draw(st.integers(0, 3)):
            alike(recipe, REJECTIONS, reads_only)
        else:
            unlike([recipe, data.draw(strategy)], REJECTIONS, reads_only)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_functions_on_ranks_raise_documented_errors_only(name: str, data: st.DataObject) -> None:
    check(name, data)
