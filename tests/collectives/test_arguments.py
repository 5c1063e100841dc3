"""Tensors that are more, or less, than their own memory, and modes that see what is done to them.

All of it is refused before anything is sent: the rank that refuses makes the right call next, which
the others have been waiting for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import adasum
import collectives
from collectives import Average, FusedBuffer, Group, Max, Min, Product, Sum, run_threads
from collectives.reducers import COPIED
from collectives.schedules import halving
from tests.processes.harness import run_ranks

Tensor = torch.Tensor
SPARSE = torch.sparse_coo_tensor(size=(2, 3))


class Wrapper(Tensor):
    """Holds a tensor, and has no memory itself."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return tree_map(
            lambda each: Wrapper(each) if isinstance(each, Tensor) else each,
            function(*tree_map(inner, args), **tree_map(inner, kwargs or {})),
        )


class Plain(Tensor):
    """A name for a tensor, and no more."""


class Refusing(TorchDispatchMode):
    """Makes every operation fail, but those that make the arguments of a call."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket.__name__ not in ("ones", "empty"):
            raise RuntimeError("refused")
        return function(*args, **(kwargs or {}))


class Counting(TorchFunctionMode):
    """Sees every function, and lets it be."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def _freed() -> Tensor:
    tensor = torch.ones(6)
    tensor.untyped_storage().resize_(0)
    return tensor


def _short() -> Tensor:
    tensor = torch.ones(6)
    tensor.untyped_storage().resize_(12)
    return tensor


def _short_at_an_offset() -> Tensor:
    tensor = torch.ones(8)[2:]
    tensor.untyped_storage().resize_(24)
    return tensor


TENSORS: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "wrapper": (lambda: Wrapper(torch.ones(6)), TypeError, "Wrapper.*pass what is inside it"),
    "fake": (
        lambda: FakeTensorMode().from_tensor(torch.ones(6)),
        TypeError,
        "FakeTensor.*pass what is inside it",
    ),
    "freed": (_freed, TypeError, "reaches beyond its storage"),
    "short": (_short, TypeError, "reaches beyond its storage"),
    "short at an offset": (_short_at_an_offset, TypeError, "reaches beyond its storage"),
}
CALLS: dict[str, tuple[Callable[[Group, Tensor], Any], str]] = {
    "all_reduce": (lambda g, t: g.all_reduce(t), "tensor"),
    "all_reduce async": (lambda g, t: g.all_reduce(t, async_op=True), "tensor"),
    "grouped": (lambda g, t: g.grouped_all_reduce([torch.ones(2), t]), r"tensors\[1\]"),
    "run": (lambda g, t: g.run(halving.doubling(2), t), "tensor"),
    "reduce": (lambda g, t: g.reduce(t), "tensor"),
    "owners": (lambda g, t: g.reduce_to_owners([t]), r"tensors\[0\]"),
    "from owners": (lambda g, t: g.broadcast_from_owners([t]), r"tensors\[0\]"),
    "reduce_scatter": (lambda g, t: g.reduce_scatter(t), "tensor"),
    "out": (lambda g, t: g.reduce_scatter(torch.ones(12), out=t), "out"),
    "all_gather": (lambda g, t: g.all_gather(t), "tensor"),
    "gathered out": (lambda g, t: g.all_gather(torch.ones(3), out=t), "out"),
    "all_to_all": (lambda g, t: g.all_to_all(t), "tensor"),
    "splits": (lambda g, t: g.all_to_all(torch.ones(6), t), "splits"),
    "broadcast": (lambda g, t: g.broadcast(t), "tensor"),
    "request": (lambda g, t: g.all_reduce_init(t), "tensor"),
    "grouped request": (lambda g, t: g.grouped_all_reduce_init([t]), r"tensors\[0\]"),
    "broadcast request": (lambda g, t: g.broadcast_init(t), "tensor"),
    "scattered request": (lambda g, t: g.reduce_scatter_init(t), "tensor"),
    "owners' request": (lambda g, t: g.reduce_to_owners_init([t]), r"tensors\[0\]"),
    "run request": (lambda g, t: g.run_init(halving.doubling(2), t), "tensor"),
    "start": (
        lambda g, t: g.all_reduce_init(torch.ones(6), negotiate=False).start(t),
        "tensor",
    ),
    "fused buffer": (lambda g, t: FusedBuffer([t]), r"tensors\[0\]"),
    "fused memory": (lambda g, t: FusedBuffer([torch.ones(2)], memory=t), "memory"),
    "hvd.allreduce": (lambda g, t: adasum.allreduce(t), "tensor"),
    "hvd.allreduce_": (lambda g, t: adasum.allreduce_(t), "tensor"),
    "hvd.grouped_allreduce": (lambda g, t: adasum.grouped_allreduce([t]), r"tensors\[0\]"),
    "hvd.grouped_allreduce_": (lambda g, t: adasum.grouped_allreduce_([t]), r"tensors\[0\]"),
    "hvd.allgather": (lambda g, t: adasum.allgather(t), "tensor"),
    "hvd.grouped_allgather": (
        lambda g, t: adasum.grouped_allgather([torch.ones(2), t]),
        r"tensors\[1\]",
    ),
    "hvd.broadcast": (lambda g, t: adasum.broadcast(t, 0), "tensor"),
    "hvd.broadcast_": (lambda g, t: adasum.broadcast_(t, 0), "tensor"),
    "hvd.alltoall": (lambda g, t: adasum.alltoall(t), "tensor"),
    "hvd.reducescatter": (lambda g, t: adasum.reducescatter(t), "tensor"),
    "hvd.grouped_reducescatter": (
        lambda g, t: adasum.grouped_reducescatter([torch.ones(2), t]),
        r"tensors?\b",
    ),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("call", CALLS)
def test_tensor_without_plain_memory_on_one_rank_leaves_the_group_usable(
    call: str, kind: str
) -> None:
    make, error, message = TENSORS[kind]
    function, argument = CALLS[call]

    def job(group: Group) -> list[float]:
        if group.rank == 1:
            with pytest.raises(error, match=f"^{argument}.*{message}"):
                function(group, make())
        return group.all_reduce(torch.full((3,), group.rank + 1.0)).tolist()

    assert run_threads(2, job) == [[3.0] * 3] * 2


MODES: dict[str, tuple[Callable[[], Any], str]] = {
    "dispatch": (Refusing, "a TorchDispatchMode"),
    "fake": (FakeTensorMode, "a TorchDispatchMode"),
    "function": (Counting, "a TorchFunctionMode"),
}
UNDER_MODES: dict[str, Callable[[Group, Tensor], Any]] = {
    **{name: call for name, (call, _) in CALLS.items() if name != "start"},
    "barrier": lambda g, t: g.barrier(),
    "join": lambda g, t: g.join(),
    "split": lambda g, t: g.split([0, 1]),
    "bytes": lambda g, t: g.all_gather_bytes(b"bytes"),
    "hvd.barrier": lambda g, t: adasum.barrier(),
    "hvd.broadcast_object": lambda g, t: adasum.broadcast_object({"a": 1}),
    "hvd.allgather_object": lambda g, t: adasum.allgather_object({"a": 1}),
    "hvd.sparse": lambda g, t: adasum.sparse_allreduce_async(SPARSE, "sparse", Sum),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", UNDER_MODES)
def test_call_under_a_mode_of_one_rank_is_refused_and_the_group_stays_usable(
    call: str, mode: str
) -> None:
    make, message = MODES[mode]

    def job(group: Group) -> list[float]:
        tensor = torch.ones(6)
        if group.rank == 1:
            with make(), pytest.raises(TypeError, match=message):
                UNDER_MODES[call](group, tensor)
        return group.all_reduce(torch.full((3,), group.rank + 1.0)).tolist()

    assert run_threads(2, job) == [[3.0] * 3] * 2


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize", "captured"])
def test_call_inside_a_transform_is_refused_and_leaves_nothing_behind(transform: str) -> None:
    def job(group: Group) -> list[float]:
        captured = torch.ones(3)

        def function(tensor: Tensor) -> Tensor:
            with pytest.raises(TypeError, match=r"a transform of torch\.func"):
                group.all_reduce(captured if transform == "captured" else tensor)
            return tensor.sum()

        name = "grad" if transform == "captured" else transform
        argument = torch.ones(2, 3) if name == "vmap" else torch.ones(3)
        if group.rank == 1:
            getattr(torch.func, name)(function)(argument)
        return group.all_reduce(torch.full((3,), group.rank + 1.0)).tolist()

    assert run_threads(2, job) == [[3.0] * 3] * 2


def test_default_device_is_no_mode_that_is_refused() -> None:
    def job(group: Group) -> list[float]:
        with torch.device("meta"):
            tensor = torch.full((3,), group.rank + 1.0, device="cpu")
            group.barrier()
            return group.all_reduce(tensor).tolist()

    assert run_threads(2, job) == [[3.0] * 3] * 2


def test_parameters_buffers_and_plain_subclasses_are_taken() -> None:
    def job(group: Group) -> None:
        for tensor in (
            torch.nn.Parameter(torch.ones(3)),
            torch.nn.Buffer(torch.ones(3)),
            torch.ones(3).as_subclass(Plain),
        ):
            assert group.all_reduce(tensor).detach().tolist() == [2.0] * 3

    run_threads(2, job)


SPLITS: dict[str, Any] = {
    "sum": [2**62, 2**62, 2**62, 2**62],
    "tensor": torch.tensor([2**62] * 4),
    "number": [2**64, 0, 0, 0],
    "negative sum": [2**63 - 1, 2**63 - 1, 2, 0],
    "small dtype": torch.tensor([100, 100, 100, 100], dtype=torch.int8),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_splits_that_overflow_on_one_rank_are_refused(kind: str) -> None:
    def job(group: Group) -> list[int]:
        tensor = torch.arange(4.0)
        if group.rank == 2:
            with pytest.raises(ValueError, match=r"^splits"):
                group.all_to_all(tensor, SPLITS[kind])
        return group.all_to_all(tensor)[1].tolist()

    assert run_threads(4, job) == [[1] * 4] * 4


def _distributed_tensor(rank: int, transport: str) -> None:
    group = collectives.init(timeout=20.0, transport=transport)
    local = torch.full((3,), rank + 1.0)
    if rank == 1:
        mesh = DeviceMesh("cpu", [1], _init_backend=False)
        given = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        for call in (group.all_reduce, adasum.allreduce, adasum.allreduce_, group.all_reduce_init):
            with pytest.raises(TypeError, match=r"got DTensor.*to_local\(\) of a DTensor"):
                call(given)
    assert group.all_reduce(local).tolist() == [3.0] * 3
    collectives.shutdown()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_dtensor_of_one_rank_is_refused_and_the_group_stays_usable(transport: str) -> None:
    run_ranks(2, _distributed_tensor, transport, timeout=60.0)


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_of_dtypes_say_what_torch_computes(dtype: torch.dtype) -> None:
    def works(function: Callable[[Tensor], object]) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Of some dtypes torch multiplies vectors, and no single element.
                for numel in (1, 2):
                    function(torch.empty(numel, dtype=dtype))
        except (RuntimeError, TypeError):
            return False
        return True

    def accepts(op: Any) -> bool:
        try:
            op.check(dtype)
        except TypeError:
            return False
        return True

    assert (dtype in COPIED) == works(torch.clone)
    assert accepts(Max) == works(lambda t: torch.maximum(t, t, out=t))
    assert accepts(Min) == works(lambda t: torch.minimum(t, t, out=t))
    assert accepts(Product) == works(lambda t: torch.mul(t, t, out=t))
    added = works(lambda t: torch.add(t, t, out=t)) and dtype is not torch.bool
    assert accepts(Sum) == added
    assert accepts(Average) == added
    if added:
        assert works(lambda t: Average.finish(t, 3))
