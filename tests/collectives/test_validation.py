"""Bad input: an error that names the argument and the fix, and nothing sent or changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import collectives
from collectives import Group, Max, Needs, Reducer, Sum
from collectives.reducers import SumReducer
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld, Transport


class _Silent(Transport):
    """A transport on which any message is a failure."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2

    def check_device(self, device: torch.device) -> None:
        ThreadWorld(1).transport(0).check_device(device)

    def exchange(self, *args: object) -> None:
        raise AssertionError("something was sent")

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        raise AssertionError("something was split")

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.fixture
def group() -> Iterator[Group]:
    silent = Group(_Silent(), timeout=1.0, local_rank=0, local_size=2, topology=Topology(2, 2))
    yield silent
    silent.close()


def _with_tangent(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


class _Uniform(Reducer):
    name = "Ordered"
    needs = Needs.ONE_TREE

    def check(self, dtype: torch.dtype) -> None:
        if dtype is not torch.float32:
            raise TypeError(f"{self.name} has no meaning on {dtype}")


class _Misspelt(_Uniform):
    needs = "every"  # type: ignore[assignment]


class _Doubled(SumReducer):
    """Reduces in a way of its own, which no library knows."""

    name = "Doubled"


T = torch.Tensor
Case = tuple[Callable[[Group, T], object], type[Exception], str]

CASES: dict[str, Case] = {
    "not a tensor": (lambda g, t: g.all_reduce([1.0]), TypeError, "tensor must be a torch.Tensor"),
    "strided": (lambda g, t: g.all_reduce(t.t()), ValueError, r"contiguous.*\(3, 2\)"),
    "expanded": (lambda g, t: g.broadcast(t[:1, :1].expand(2, 2)), ValueError, "contiguous"),
    "sparse": (lambda g, t: g.all_reduce(t.to_sparse()), ValueError, r"dense.*to_dense\(\)"),
    "meta": (lambda g, t: g.all_reduce(t.to("meta")), ValueError, "on meta"),
    "bool": (lambda g, t: g.all_reduce(t > 0), TypeError, r"torch\.bool"),
    "op": (lambda g, t: g.all_reduce(t, "sum"), TypeError, "op must be a Reducer"),
    "op dtype": (lambda g, t: g.all_reduce(t.double(), _Uniform()), TypeError, r"torch\.float64"),
    "needs": (lambda g, t: g.all_reduce(t, _Misspelt()), TypeError, "must be Needs, got 'every'"),
    "unknown": (lambda g, t: g.all_reduce(t, colour=1), TypeError, r"^all_reduce\(\) got an unexp"),
    "unknown to a request": (
        lambda g, t: g.reduce_to_owners_init([t], colour=1),
        TypeError,
        r"^reduce_to_owners\(\) got an unexpected keyword argument 'colour'",
    ),
    "algorithm of a scatter": (
        lambda g, t: g.reduce_scatter(t, algorithm="rd"),
        TypeError,
        r"^reduce_scatter\(\) got an unexpected keyword argument 'algorithm'",
    ),
    "algorithm": (
        lambda g, t: g.all_reduce(t, algorithm="bogus"),
        ValueError,
        "rechd, .*vhdd",
    ),
    "needs_one_tree": (
        lambda g, t: g.all_reduce(t, _Uniform(), algorithm="rd:8:collective"),
        ValueError,
        "'collective' is a library's own sum, which cannot do Ordered",
    ),
    "operator that a library does not know": (
        lambda g, t: g.all_reduce(t, _Doubled(), algorithm="collective"),
        ValueError,
        "algorithm 'collective' is a library's own sum, which cannot do Doubled: use xring, rechd",
    ),
    "operator that nodes do not know": (
        lambda g, t: g.all_reduce(t, _Doubled(), algorithm="xring/rechd"),
        ValueError,
        "algorithm 'xring/rechd' sums inside the nodes, which cannot do Doubled: use 'rechd'",
    ),
    "specification": (
        lambda g, t: g.all_reduce(t, algorithm="xring:64k:nccl:2k:pscpu"),
        ValueError,
        "limits must be positive and ascending",
    ),
    "specification type": (lambda g, t: g.all_reduce(t, algorithm=3), TypeError, "must be a str"),
    "shards": (
        lambda g, t: g.all_reduce(t, algorithm="rd#1099511627776"),
        ValueError,
        "chunks must be at most 1048576, rd#1099511627776 has 1099511627776",
    ),
    "rings": (lambda g, t: g.all_reduce(t, algorithm="xring#3"), ValueError, "1 to 2 shards.* 3"),
    "servers": (lambda g, t: g.all_reduce(t, algorithm="psgpu#3"), ValueError, "1 to 2 shards"),
    "a range not taken": (
        lambda g, t: g.all_reduce(t, algorithm="rd:1k:xring#3"),
        ValueError,
        "1 to 2 shards",
    ),
    "nccl": (lambda g, t: g.all_reduce(t, algorithm="nccl"), ValueError, "use 'collective'"),
    "collective": (
        lambda g, t: g.all_reduce(t, algorithm="collective"),
        ValueError,
        "has no process group",
    ),
    "reduce dst": (lambda g, t: g.reduce(t, 2), ValueError, "dst must be a rank from 0 to 1"),
    "reduce op": (lambda g, t: g.reduce(t, 0, _Uniform()), ValueError, "Ordered needs all ranks"),
    "owners": (lambda g, t: g.reduce_to_owners(t), TypeError, "sequence of tensors"),
    "owners' tensors": (
        lambda g, t: g.broadcast_from_owners([t.t()]),
        ValueError,
        r"tensors\[0\] must be contiguous",
    ),
    "prescale": (
        lambda g, t: g.all_reduce(t, prescale="2"),
        TypeError,
        "prescale must be a number",
    ),
    "infinite": (lambda g, t: g.all_reduce(t, postscale=float("inf")), ValueError, "postscale"),
    "bool scale": (lambda g, t: g.all_reduce(t > 0, Max, prescale=0.5), TypeError, "factors"),
    "made by autograd": (
        lambda g, t: g.all_gather(t.requires_grad_() * 2),
        ValueError,
        r"tensor requires grad, .* pass tensor\.detach\(\), or use adasum's functions",
    ),
    "list made by autograd": (
        lambda g, t: g.grouped_all_reduce([t.requires_grad_() * 2]),
        ValueError,
        r"tensors\[0\] requires grad",
    ),
    "tangent": (
        lambda g, t: _with_tangent(g.reduce_scatter, t),
        ValueError,
        r"tensor has a tangent, .* pass forward_ad\.unpack_dual\(tensor\)\.primal",
    ),
    "scale of integers": (
        lambda g, t: g.all_reduce(t.to(torch.int64), prescale=-(2.0**63)),
        ValueError,
        r"prescale must lie within ±9\.223e\+18 for torch\.int64, got -9\.22",
    ),
    "scale of a byte": (
        lambda g, t: g.reduce_scatter(t.to(torch.uint8), postscale=256.0),
        ValueError,
        r"postscale must lie within ±255 for torch\.uint8, got 256",
    ),
    "scale beyond float32": (
        lambda g, t: g.grouped_all_reduce([t.bfloat16()], Sum, postscale=1e50),
        ValueError,
        r"postscale must lie within ±3\.403e\+38 for torch\.bfloat16",
    ),
    "scale of complex": (
        lambda g, t: g.all_reduce_init(t.to(torch.complex64), prescale=1e39),
        ValueError,
        r"prescale must lie within ±3\.403e\+38 for torch\.complex64",
    ),
    "segments end": (lambda g, t: g.all_reduce(t, segments=(0, 5)), ValueError, "end at .* 6"),
    "segments order": (lambda g, t: g.all_reduce(t, segments=(0, 4, 2, 6)), ValueError, "descend"),
    "segments type": (
        lambda g, t: g.all_reduce(t, segments=(0, 1.5, 6)),
        TypeError,
        "segments must be ints",
    ),
    "quantized": (
        lambda g, t: g.all_gather(torch.quantize_per_tensor(t, 1.0, 0, torch.qint8)),
        ValueError,
        r"must not be quantized: pass tensor.int_repr\(\)",
    ),
    "less than bytes": (
        lambda g, t: g.all_to_all(torch.empty(2, dtype=torch.uint4)),
        TypeError,
        r"torch\.uint4, which torch cannot copy",
    ),
    "bytes": (lambda g, t: g.all_gather_bytes("text"), TypeError, "payload must be bytes, got str"),
    "one tensor": (lambda g, t: g.grouped_all_reduce(t), TypeError, "sequence of tensors"),
    "list entry": (
        lambda g, t: g.grouped_all_reduce([t, None]),
        TypeError,
        r"tensors\[1\] must be a torch.Tensor",
    ),
    "overlap": (
        lambda g, t: g.grouped_all_reduce([t, t.view(-1)[2:4]]),
        ValueError,
        r"tensors\[0\] and tensors\[1\] overlap",
    ),
    "root": (lambda g, t: g.broadcast(t, 2), ValueError, "root must be a rank from 0 to 1"),
    "root type": (lambda g, t: g.broadcast(t, "0"), TypeError, "root must be an int"),
    "scalar gather": (lambda g, t: g.all_gather(t.sum()), ValueError, r"reshape\(1\)"),
    "out type": (lambda g, t: g.all_gather(t, out=[t]), TypeError, "out must be a torch.Tensor"),
    "out dtype": (
        lambda g, t: g.all_gather(t, out=torch.empty(4, 3, dtype=torch.float64)),
        TypeError,
        r"out must be of torch\.float32 as tensor is, got torch\.float64",
    ),
    "out device": (
        lambda g, t: g.reduce_scatter(t, out=torch.empty(3, device="meta")),
        ValueError,
        "out is on meta, where tensors have no values",
    ),
    "out columns": (
        lambda g, t: g.all_gather(t, out=torch.empty(4, 2)),
        ValueError,
        r"out must have shape \(4, 3\), got \(4, 2\)",
    ),
    "out piece": (
        lambda g, t: g.reduce_scatter(t, out=torch.empty(4)),
        ValueError,
        r"out must have shape \(3,\), got \(4,\)",
    ),
    "out rows": (
        lambda g, t: g.reduce_scatter(t, by_rows=True, out=torch.empty(3)),
        ValueError,
        r"out must have shape \(1, 3\), got \(3,\)",
    ),
    "out strides": (
        lambda g, t: g.all_gather(t, out=torch.empty(3, 4).t()),
        ValueError,
        "out must be contiguous",
    ),
    "out overlaps": (
        lambda g, t: g.reduce_scatter(t, out=t.view(-1)[3:]),
        ValueError,
        "out and tensor overlap in memory",
    ),
    "scatter": (lambda g, t: g.reduce_scatter(t.t()), ValueError, "contiguous"),
    "gather": (lambda g, t: g.all_gather(t.t()), ValueError, "contiguous"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_argument_raises_and_names_the_fix(group: Group, case: str) -> None:
    call, error, message = CASES[case]
    tensor = torch.arange(6.0).view(2, 3)
    with pytest.raises(error, match=message):
        call(group, tensor)
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))


def test_all_reduce_of_a_leaf_that_requires_grad_is_in_place() -> None:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    leaf = torch.ones(3, requires_grad=True)
    group.all_reduce(leaf, Sum, prescale=2.0)
    assert torch.equal(leaf.detach(), torch.full((3,), 2.0)) and leaf.requires_grad
    group.all_reduce(leaf[1:], Sum, prescale=2.0)
    assert leaf.tolist() == [2.0, 4.0, 4.0]
    with torch.no_grad():
        group.all_reduce(leaf * 2, Sum)
    made = leaf * 2
    with torch.no_grad():
        group.all_reduce(made, Sum)
    group.close()


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.int8, 127.0), (torch.float64, 1e300), (torch.complex128, 1e300)]
)
def test_the_largest_factors_of_a_dtype_multiply(dtype: torch.dtype, factor: float) -> None:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    result = group.all_reduce(torch.ones(2, dtype=dtype), Sum, prescale=factor)
    assert torch.equal(result, torch.full((2,), factor, dtype=dtype))
    group.close()


@pytest.mark.parametrize("timeout", [math.inf, math.nan, 0, -1, 1e300])
def test_group_of_a_bad_timeout_raises(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        Group(ThreadWorld(1).transport(0), timeout=timeout, local_rank=0, local_size=1)


PURE: dict[str, Callable[[Any], Any]] = {
    "indices": collectives.extract_ranges,
    "local_order": lambda bad: collectives.ring_permutations(1, 1, bad),
    "tensors": lambda bad: collectives.buffer_of([torch.ones(2), bad]),
    "fn": lambda bad: collectives.run_threads(2, bad),
}


@pytest.mark.parametrize("argument", PURE)
@pytest.mark.parametrize("bad", [None, 5, [1.5]])
def test_argument_of_another_type_is_named(argument: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{argument}(\[1\]|'s members)? must be a[ n]"):
        PURE[argument](bad)


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_are_factors(half: Any) -> None:
    def work(group: Group) -> list[float]:
        x = torch.ones(2)
        group.all_reduce(x, Sum, prescale=half, postscale=np.int64(3))
        found: list[float] = x.tolist()
        return found

    assert collectives.run_threads(2, work) == [[3.0, 3.0]] * 2
