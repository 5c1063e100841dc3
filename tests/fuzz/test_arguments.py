"""Every public function with one odd argument at a time: a documented error, or an answer.

A rejected call has changed nothing. On ranks all are told the same, and the group works afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import adasum
import collectives
import kernels
from adasum import Adasum, Average, Compression, HookState, ProcessSet, Sum
from adasum.orthogonality import Recorder, orthogonality
from collectives import Collective, Group, Topology
from collectives.schedules import halving
from collectives.schedules.symbolic_step import ScheduleError
from collectives.transport import ThreadWorld
from tests.fuzz.outcome import Call, attempt, right, wrong_calls

Table = dict[str, Callable[[], Call]]
CUTS = (0, 2, 6)
TREE = [(0, 1, 1, 1)]


def one() -> Tensor:
    return torch.arange(1.0, 7.0)


def two() -> list[Tensor]:
    return [one(), one().flip(0)]


def flag() -> Tensor:
    return torch.zeros(())


def dots() -> Tensor:
    return kernels.dot_and_norms_reference(*two(), CUTS)


def table() -> Tensor:
    return torch.ones(2, 2, dtype=torch.float64)


def matrices() -> Tensor:
    return kernels.gram_reference(two(), CUTS)[None]


def pair(**more: Any) -> Call:
    return right(*two(), segments=CUTS, **more)


def written() -> dict[str, Any]:
    return {"out": torch.zeros(6), "found_inf": flag()}


def found(**more: Any) -> dict[str, Any]:
    return {"found_inf": flag(), "scale": 0.5, **more}


def packed() -> tuple[kernels.Layout, Tensor]:
    layout = kernels.layout_of(two())
    return layout, torch.zeros(layout.numel)


WEIGHTS = {"weights": (1.0, 2.0)}
ORDER = {"scale": 0.5, "order": "tree", "accumulate": torch.float32}
KERNELS: Table = {
    "adasum": lambda: pair(**WEIGHTS, **written()),
    "adasum_bytes": lambda: right(*two()),
    "adasum_reference": lambda: pair(**WEIGHTS),
    "adasum_coefficients": lambda: right(
        matrices(), TREE, spread=torch.zeros(2, dtype=torch.float64), out=table()
    ),
    "adasum_coefficients_bytes": lambda: right(matrices()),
    "adasum_coefficients_reference": lambda: right(matrices(), TREE),
    "combine": lambda: right(*two(), dots(), segments=CUTS, **WEIGHTS, **written()),
    "combine_bytes": lambda: pair(),
    "combine_reference": lambda: right(*two(), dots(), segments=CUTS, **WEIGHTS),
    "dot_and_norms": lambda: pair(),
    "dot_and_norms_bytes": lambda: pair(),
    "dot_and_norms_reference": lambda: pair(),
    "gram": lambda: right(two(), segments=CUTS, precise=True),
    "gram_bytes": lambda: right(two(), segments=CUTS),
    "gram_reference": lambda: right(two(), segments=CUTS),
    "layout_of": lambda: right(two(), dtype=torch.float16, alignment=64),
    "pack": lambda: right(two(), layout=packed()[0], out=packed()[1], **found()),
    "pack_bytes": lambda: right(two(), layout=packed()[0]),
    "pack_reference": lambda: right(two(), layout=packed()[0], scale=0.5),
    "scaled_add": lambda: right(*two(), alpha=0.5, beta=2, dtype=torch.float32, **written()),
    "scaled_add_bytes": lambda: right(*two(), dtype=torch.float32),
    "scaled_add_reference": lambda: right(*two(), alpha=0.5, beta=2),
    "sum_n": lambda: right(two(), dtype=torch.float32, **ORDER, **written()),
    "sum_n_bytes": lambda: right(two(), dtype=torch.float32),
    "sum_n_reference": lambda: right(two(), **ORDER),
    "unpack": lambda: right(packed()[1], two(), layout=packed()[0], **found()),
    "unpack_bytes": lambda: right(packed()[1], two(), layout=packed()[0]),
    "unpack_reference": lambda: right(*packed()[::-1], scale=0.5),
    "weighted_sum": lambda: right(two(), table(), segments=CUTS, **written()),
    "weighted_sum_bytes": lambda: right(two(), segments=CUTS),
    "weighted_sum_reference": lambda: right(two(), table(), segments=CUTS),
}


def _group(**options: Any) -> None:
    collectives.Group(ThreadWorld(1).transport(0), **options).close()


# They make as many pieces, rings or groups as they are told, and no limit would suit all.
ENORMOUS = ("DistributedOptimizer", "ring_permutations", "split_bounds")

# Of one process, without another rank.
COLLECTIVES: Table = {
    "FusedBuffer": lambda: right(two(), memory=torch.zeros(64)),
    "Group": lambda: right(timeout=1.0, local_rank=0, local_size=1, topology=Topology(1, 1)),
    "Schedule": lambda: right("name", 3, 3, Collective.REDUCE, len, root=1, replicas=1),
    "Topology": lambda: right(2, 2, local_order=[1, 0]),
    "buffer_of": lambda: right(two()),
    "extract_ranges": lambda: right([1, 3, 4], range_size_limit=2),
    "group_devices": lambda: right([0, 1, 2], 2),
    "order_of": lambda: right("rd", 4, op=Sum, order="tree", nodes=2),
    "pack_small_tensors": lambda: right(two(), max_bytes=64, max_group=2),
    "parse_all_reduce_spec": lambda: right("xring:2k:rd"),
    "parse_general_int": lambda: right("32k"),
    "plan_groups": lambda: right(two(), memory_size=1, groups_size=2),
    "ring_permutations": lambda: right(2, 1, [0, 1]),
    "schedule": lambda: right("rechd/vhdd", 4, nodes=2, op="adasum", nbytes=1e6, device="cpu"),
    "split_bounds": lambda: right(7, 3),
    "split_by_size": lambda: right(two(), 3),
    "unpack_small_tensors": lambda: right(
        *collectives.pack_small_tensors(two(), max_bytes=64, max_group=2)
    ),
    "verify": lambda: right(halving.doubling(3), joins="tree"),
}
WAITS = {"name": "gradient", "async_op": True}
SCALES = {"prescale": 0.5, "postscale": 2}
METHODS: Table = {
    "all_gather": lambda: right(one(), out=torch.zeros(12), **WAITS),
    "all_reduce": lambda: right(
        one(), op=Average, algorithm="rd", segments=CUTS, **SCALES, **WAITS
    ),
    "all_to_all": lambda: right(one(), splits=[2, 4], **WAITS),
    "barrier": lambda: right(name="gradient"),
    "broadcast": lambda: right(one(), root=1, **WAITS),
    "broadcast_from_owners": lambda: right(two(), owners=[0, 1], **WAITS),
    "grouped_all_reduce": lambda: right(
        two(), op=Sum, algorithm="xring", names=["w", "b"], packed=True, **SCALES, **WAITS
    ),
    "owners": lambda: right([3, 4]),
    "reduce": lambda: right(one(), dst=1, op=Sum, **WAITS),
    # Without `out`, which may fit the slice of one rank and not that of another.
    "reduce_scatter": lambda: right(one(), op=Sum, by_rows=False, **SCALES, **WAITS),
    "reduce_to_owners": lambda: right(two(), op=Sum, owners=[1, 0], **SCALES, **WAITS),
    "run": lambda: right(halving.doubling(2), one(), op=Sum, segments=CUTS, **SCALES, **WAITS),
    "split": lambda: right([0, 1]),
}


def reduction(tensor: Any, **more: Any) -> Call:
    return right(
        tensor,
        op=Sum,
        name="gradient",
        process_set=adasum.global_process_set,
        prescale_factor=0.5,
        postscale_factor=2,
        **more,
    )


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), momentum=0.9)


ORDERED = {"order": "tree", "accumulate": torch.float32}
NAMED: dict[str, Any] = {"name": "gradient", "process_set": adasum.global_process_set}
COMPRESSION: dict[str, Any] = {"compression": Compression.fp16}
ADASUM: Table = {
    "add_process_set": lambda: right([0, 1]),
    "allgather": lambda: right(one(), **NAMED),
    "allgather_object": lambda: right([1, {"a": 2.0}], **NAMED),
    "allreduce": lambda: reduction(one(), **ORDERED, **COMPRESSION),
    "allreduce_": lambda: reduction(one(), **ORDERED),
    "allreduce_async": lambda: reduction(one(), **ORDERED),
    "allreduce_async_": lambda: reduction(one(), **ORDERED),
    "alltoall": lambda: right(one(), splits=torch.tensor([2, 4]), **NAMED),
    "barrier": lambda: right(process_set=adasum.global_process_set),
    "bits_of": lambda: right(adasum.DistributedOptimizer(optimizer())),
    "broadcast": lambda: right(one(), 1, **NAMED),
    "broadcast_": lambda: right(one(), 1, **NAMED),
    "broadcast_object": lambda: right([1, 2], root_rank=1, **NAMED),
    "broadcast_optimizer_state": lambda: right(optimizer(), 1),
    "broadcast_parameters": lambda: right(torch.nn.Linear(2, 2).state_dict(), 1),
    "grouped_allgather": lambda: right(two(), **NAMED),
    "grouped_allreduce": lambda: reduction(two(), **ORDERED, **COMPRESSION),
    "grouped_allreduce_": lambda: reduction(two(), **ORDERED),
    "grouped_reducescatter": lambda: reduction(two(), **COMPRESSION),
    "join": lambda: right(device=-1),
    "poll": lambda: right(adasum.allreduce_async(one())),
    "process_set_by_id": lambda: right(0),
    "reducescatter": lambda: reduction(one(), **COMPRESSION),
    "remove_process_set": lambda: right(ProcessSet([1])),
    "sparse_allreduce_async": lambda: right(torch.eye(2, 3).to_sparse(), "embedding", Sum),
    "synchronize": lambda: right(adasum.allreduce_async(one())),
}


def _init(**options: Any) -> None:
    """Start, and end again."""
    try:
        adasum.init(**options)
    finally:
        adasum.shutdown()


def _from_process_group(process_group: Any, timeout: Any) -> None:
    collectives.from_process_group(process_group, timeout=timeout).close()


def _with_group(function: Any) -> Any:
    """Return the function, in a default group of one for as long as a call takes."""

    def call(*args: Any, **options: Any) -> Any:
        collectives.init()
        try:
            return function(*args, **options)
        finally:
            collectives.shutdown()

    return call


# On one rank, which is one of torch.distributed's.
START: dict[str, tuple[Any, Callable[[], Call]]] = {
    "DistributedOptimizer": (
        _with_group(adasum.DistributedOptimizer),
        lambda: right(
            optimizer(),
            named_parameters=None,
            compression=Compression.none,
            backward_passes_per_step=2,
            op=Average,
            gradient_predivide_factor=1.0,
            groups=1,
            sparse_as_dense=False,
            process_set=None,
            algorithm="rd",
            mode=None,
            weighted=True,
            check_parameters=True,
            method="gradient",
            step_in_backward=False,
            memory_size=1.0,
            groups_size=None,
        ),
    ),
    "GradientRecorder": (
        adasum.GradientRecorder,
        lambda: right(10, max_rows=100, factor=2.0, group=None, on_step=print),
    ),
    "HookState": (
        HookState,
        lambda: right(
            Adasum,
            algorithm="vhdd",
            process_group=None,
            timeout=1.0,
            named_parameters=[("a", torch.ones(1))],
            check_parameters=True,
        ),
    ),
    "ProcessSet": (ProcessSet, lambda: right([0])),
    "Recorder": (Recorder, lambda: right(10, group=None)),
    "from_process_group": (_from_process_group, lambda: right(dist.group.WORLD, 5)),
    "init": (_init, lambda: right(process_sets=[[0]], timeout=5, transport="gloo")),
    "orthogonality": (_with_group(orthogonality), lambda: right(two(), group=None)),
    "register_fsdp_hook": (
        adasum.register_fsdp_hook,
        lambda: right(torch.nn.Linear(2, 2), HookState(Adasum)),
    ),
    "run_threads": (
        collectives.run_threads,
        lambda: right(2, lambda group: group.size, timeout=5.0, local_size=2),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_reject_with_documented_errors(name: str) -> None:
    reads_only = name.endswith(("_bytes", "_reference", "_norms", "_of"))
    for about, call in wrong_calls(name, KERNELS[name]):
        answer, error = attempt(getattr(kernels, name), call, reads_only=reads_only)
        assert error is None or about != "as it is", error
        if error is None and name.endswith("_bytes"):
            assert type(answer) is int and answer >= 0, about
        if isinstance(answer, Tensor) and reads_only:
            assert answer.layout is torch.strided and not answer.requires_grad, about


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_without_ranks_reject_with_documented_errors(name: str) -> None:
    function = _group if name == "Group" else getattr(collectives, name)
    for about, call in wrong_calls(name, COLLECTIVES[name], huge=name not in ENORMOUS):
        try:
            _, error = attempt(function, call, reads_only=True)
        except ScheduleError:
            assert name == "verify"
        else:
            assert error is None or about != "as it is", error


def on_ranks(name: str, make: Callable[[], Call], function: Callable[[Group], Any]) -> None:
    """Two ranks make each call on tensors of their own; after it their group still works."""

    def run(group: Group) -> list[tuple[str, str]]:
        found = []
        for about, call in wrong_calls(name, make):
            _, error = attempt(function(group), call)
            assert error is None or about != "as it is", error
            found.append((about, type(error).__name__))
            whole = group.all_reduce(torch.ones(3))
            assert isinstance(whole, Tensor) and whole.tolist() == [2.0] * 3, about
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = collectives.run_threads(2, run, timeout=20.0)
    assert first == second


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_group_reject_alike_on_all_ranks(name: str) -> None:
    on_ranks(name, METHODS[name], lambda group: getattr(group, name))


@pytest.mark.parametrize("name", ADASUM)
def test_functions_of_adasum_reject_alike_on_all_ranks(name: str) -> None:
    on_ranks(name, ADASUM[name], lambda group: getattr(adasum, name))


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", START)
def test_start_and_hooks_reject_with_documented_errors(name: str) -> None:
    function, make = START[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for about, call in wrong_calls(name, make, huge=name not in ENORMOUS):
            _, error = attempt(function, call, reads_only=True)
            assert error is None or about != "as it is" or name == "register_fsdp_hook", error


def test_every_public_function_has_a_right_call() -> None:
    """But those of no argument or that write files, plans, and Horovod's forms of the others."""
    without = (
        "plan_", "dump_", "start_timeline", "stop_timeline", "init", "is_", "shutdown", "new_group",
        "default_group", "backend_info", "run_threads", "from_process_group", "register_fsdp_hook",
        "orthogonality", "ddp_hook", "get_process_set_ids", "global_process_set",
    )  # fmt: skip
    others = ("_async", "_async_", "rank", "size", "_built", "_enabled", "_supported")
    for module, known in ((kernels, KERNELS), (collectives, {**COLLECTIVES}), (adasum, ADASUM)):
        functions = [n for n in module.__all__ if n.islower()]
        missing = [n for n in functions if n not in known]
        assert [n for n in missing if not n.startswith(without) and not n.endswith(others)] == []
