"""Every algorithm of the specification string, one level and two, with what it carries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import collectives
from adasum import Adasum
from collectives import Average, Group, Sum, run_threads
from collectives.schedules.algorithm import Order
from collectives.schedules.registry import ALGORITHMS, LIBRARIES, SCHEDULES
from collectives.schedules.spec import INNER, OUTER
from collectives.schedules.topology import Topology
from tests.adasum.definition import line, tree
from tests.processes.harness import run_ranks

Tensor = torch.Tensor

ONE = ["auto", *SCHEDULES, "rechd#3", "rd#2", "bruck#2", "rd:2:xring"]
TWO = [f"{inner}/{outer}" for inner in INNER if inner not in LIBRARIES for outer in OUTER]
SHARDED = ["xring#2", "psgpu#2", "pscpu#2", "xring#2/vhdd#2", "rechd#2/xring#2", "psgpu#2/rd"]
NODES = [
    *((1, 1), (2, 2), (3, 1), (4, 2), (6, 3)),
    *(pytest.param(*nodes, marks=pytest.mark.slow) for nodes in ((6, 2), (8, 4))),
]
# What keeps one expression tree: the leaves of a balanced tree, or a line in rank order.
BALANCED = [
    *(name for name in SCHEDULES if ALGORITHMS[name].order is Order.BALANCED),
    *("auto", "vhdd#3", "xring/vhdd", "rechd/rd", "xring#2/vhdd#2"),
]
LINES = [
    *(name for name in SCHEDULES if ALGORITHMS[name].order is Order.LINE),
    *("xring/xring", "rechd/psgpu#2"),
]
SEGMENTS = (0, 100, 101, 101, 700, 1000)


def allowed(spec: str, size: int, local_size: int) -> bool:
    """Whether `#2` and what it asks for fit: a ring of a node, gather ranks among the ranks."""
    if "xring#2" in spec and local_size < 2:
        return False
    if spec.startswith("ps") and "#2" in spec.split("/")[0]:
        return (local_size if "/" in spec else size) >= 2
    return not (spec.endswith("psgpu#2") and size // local_size < 2)


def inputs(group: Group, numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(group.size)]


def sums(group: Group, specs: Sequence[str]) -> None:
    for spec in specs:
        for numel, dtype in [(0, torch.float64), (1, torch.float32), (3, torch.float64)]:
            terms = inputs(group, numel, dtype)
            for op, scale in ((Sum, 1.0), (Average, 1.0 / group.size)):
                mine = terms[group.rank].clone()
                group.all_reduce(mine, op, algorithm=spec)
                exact = torch.stack([term.double() for term in terms]).sum(0) * scale
                reach = torch.stack([term.double().abs() for term in terms]).sum(0) * scale
                # n - 1 additions and a division, each rounding once.
                bound = group.size * torch.finfo(dtype).eps * reach
                assert ((mine.double() - exact).abs() <= bound).all(), spec
        counts = torch.arange(1000) + group.rank
        group.all_reduce(counts, Sum, algorithm=spec)
        ranks = sum(range(group.size))
        assert torch.equal(counts, group.size * torch.arange(1000) + ranks), spec


@pytest.mark.parametrize(("size", "local_size"), NODES)
def test_sum_and_average(size, local_size):
    specs = [spec for spec in ONE + TWO + SHARDED if allowed(spec, size, local_size)]
    run_threads(size, lambda group: sums(group, specs), local_size=local_size)


def projections(group: Group, local_size: int, specs: Sequence[str]) -> dict[str, bytes]:
    answers = {}
    for spec in specs:
        for dtype in (torch.float64, torch.float32):
            terms = inputs(group, SEGMENTS[-1], dtype)
            leaves = [term.double() for term in terms]
            if "/" in spec:
                nodes = range(0, group.size, local_size)
                leaves = [sum(leaves[w : w + local_size]) / local_size for w in nodes]
            expected = (line if spec in LINES else tree)(leaves, SEGMENTS)
            mine = terms[group.rank].clone()
            group.all_reduce(mine, Adasum, algorithm=spec, segments=SEGMENTS)
            error = (mine.double() - expected).norm() / expected.norm()
            # The contract's bound on up to 8 ranks.
            assert error <= 100 * torch.finfo(dtype).eps, (spec, error)
            answers[f"{spec} {dtype}"] = mine.numpy().tobytes()
    return answers


@pytest.mark.parametrize(("size", "local_size"), NODES)
def test_adasum(size, local_size):
    specs = [spec for spec in BALANCED + LINES if allowed(spec, size, local_size)]
    work = lambda group: projections(group, local_size, specs)  # noqa: E731
    first, *others = run_threads(size, work, local_size=local_size)
    assert all(other == first for other in others), "ranks differ in bits"
    if size > 2:
        # Of float64 the tree goes in pairs, of narrower dtypes by one Gram matrix.
        assert first[f"vhdd {torch.float64}"] == first[f"auto {torch.float64}"]


def reductions(group: Group) -> None:
    for dst in range(group.size):
        for op, scale in ((Sum, 1.0), (Average, 1.0 / group.size)):
            for numel in (0, 1, 5, 1001):
                terms = inputs(group, numel, torch.float64)
                mine = terms[group.rank].clone()
                assert group.reduce(mine, dst, op) is mine
                if group.rank == dst:
                    exact = torch.stack(terms).sum(0) * scale
                    torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
    shapes = [(3, 5), (), (0,), (129,), (64, 7), (129,)]
    tensors = [torch.full(shape, float(group.rank + 1)) for shape in shapes]
    owners = group.reduce_to_owners(tensors)
    assert owners == group.owners([tensor.nbytes for tensor in tensors])
    total = sum(range(group.size + 1))
    for tensor, owner in zip(tensors, owners, strict=True):
        if group.rank == owner:
            assert torch.equal(tensor, torch.full_like(tensor, float(total)))
        else:
            tensor.fill_(-1.0)
    group.broadcast_from_owners(tensors)
    assert all(torch.equal(t, torch.full_like(t, float(total))) for t in tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_reduce_and_owners(size):
    run_threads(size, reductions)


def test_a_node_count_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="local_size 2 does not divide size 3"):
        run_threads(3, lambda group: None, local_size=2)


def library_job(rank: int, size: int, local_size: int) -> dict[str, bytes]:
    """What needs torch.distributed's own sum, over all ranks or inside nodes; real processes."""
    whole = collectives.init(timeout=60.0)
    group = Group(
        whole.transport,
        timeout=60.0,
        local_rank=rank % local_size,
        local_size=local_size,
        topology=Topology(size, local_size),
    )
    sums(group, ["collective", "collective#3", "collective/xring", "collective#2/rechd"])
    answers = projections(group, local_size, ["collective/vhdd", "xring/rd", "vhdd"])
    with pytest.raises(ValueError, match="cannot do Adasum"):
        group.all_reduce(torch.ones(3), Adasum, algorithm="collective")
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        group.all_reduce(torch.ones(3), algorithm="nccl/xring")
    group.close()
    collectives.shutdown()
    return answers


@pytest.mark.parametrize(("size", "local_size"), [(2, 1), (4, 2)])
def test_libraries(size, local_size):
    first, *others = run_ranks(size, library_job, size, local_size)
    assert all(other == first for other in others), "ranks differ in bits"
