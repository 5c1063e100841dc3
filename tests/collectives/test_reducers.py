"""Operators that need all operands at once, or one tree: right where they can be, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import adasum as hvd
from collectives import (
    Average,
    Group,
    Max,
    Min,
    Needs,
    Product,
    Reducer,
    Sum,
    run_threads,
)
from collectives.reducers import as_real
from collectives.schedules.registry import ALGORITHMS, SCHEDULES, carriers
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from tests.collectives.consistency.ranks import everywhere, run, start_and_wait
from tests.collectives.operators import Longest, TrimmedMean, longest, trimmed
from tests.collectives.schedules.simulation import one_level

SEGMENTS = (0, 7, 7, 500, 1021)
ABLE = carriers(Needs.ALL_OPERANDS)
UNABLE = [name for name in ALGORITHMS if name not in ABLE]
# Beyond what is reduced in one-shot in shared memory, and by the small algorithm of `auto`.
LARGE = 70_001


def draw(rank: int, numel: int = 1021, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def close(answer: torch.Tensor, size: int, trim: int = 1, scale: float = 1.0) -> None:
    """Against the float64 reference: up to n - 1 additions and 3 scalings, each rounding once."""
    inputs = torch.stack([draw(rank, answer.numel(), answer.dtype) for rank in range(size)])
    exact = scale * trimmed(inputs.double(), trim)
    reach = abs(scale) * inputs.double().abs().amax(0)
    bound = (size + 2) * torch.finfo(answer.dtype).eps * reach
    assert ((answer.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_record_says_what_the_schedule_is_proved_to_meet(name: str) -> None:
    """On three ranks and more; two always meet at once, in a balanced tree."""
    record = ALGORITHMS[name]
    for size in (3, 4, 5, 6, 8, 9, 13):
        for shards in (1, 3):
            schedule = one_level(name, shards, Topology(size, size), one_tree=True)
            proof = verify(schedule)
            tree_of_three = Needs.BALANCED_TREE if size == 3 else Needs.ANY_ORDER
            assert proof.meets | tree_of_three == record.meets | tree_of_three
            assert proof.by_tree == record.by_tree


@everywhere
@pytest.mark.parametrize("algorithm", [*ABLE, "bruck#2", "psgpu#3", "pscpu#2", None])
def test_trimmed_mean_is_its_definition(way: str, algorithm: str | None) -> None:
    def job(group: Group) -> list[torch.Tensor]:
        answers = []
        for shared in (False, True):
            op = TrimmedMean(shared=shared)
            for numel, dtype in (
                *((0, torch.float32), (1, torch.float64), (2, torch.float32)),
                *((1021, torch.float16), (1021, torch.float64), (LARGE, torch.float32)),
            ):
                options: Any = {"algorithm": algorithm, "prescale": 1.0, "postscale": 3.0}
                tensor = draw(group.rank, numel, dtype)
                assert group.all_reduce(tensor, op, **options) is tensor
                answers.append(tensor)
        return answers

    for answer, *others in zip(*run(way, 3, job), strict=True):
        close(answer, 3, scale=3.0)
        assert all(torch.equal(answer, other) for other in others)


@everywhere
@pytest.mark.parametrize("algorithm", UNABLE)
def test_algorithm_that_reduces_some_ranks_at_a_time_is_refused(way: str, algorithm: str) -> None:
    """Before anything is sent: the next call is right."""
    op = TrimmedMean(shared=True)

    def job(group: Group) -> None:
        tensor = draw(group.rank)
        for call in (
            lambda: group.all_reduce(tensor, op, algorithm=algorithm),
            lambda: group.all_reduce(tensor, op, algorithm=f"bruck:16:{algorithm}"),
            lambda: group.grouped_all_reduce([tensor], op, algorithm=algorithm),
            lambda: group.all_reduce_init(tensor, op, algorithm=algorithm),
            lambda: group.check_algorithm(algorithm, op),
        ):
            with pytest.raises(ValueError, match=rf"TrimmedMean\(1\).*use {', '.join(ABLE)}$"):
                call()
        assert torch.equal(tensor, draw(group.rank))
        close(group.all_reduce(tensor, op), group.size)

    run(way, 3, job)


@everywhere
def test_grouped_calls_and_requests_are_their_definition(way: str) -> None:
    def job(group: Group) -> None:
        op = TrimmedMean(shared=True)
        for algorithm in ("bruck", "psgpu", "psgpu#3", None):
            tensors = [draw(group.rank, numel) for numel in (5, 1021, 1)]
            group.grouped_all_reduce(tensors, op, algorithm=algorithm)
            for each in tensors:
                close(each, group.size)
            tensor = draw(group.rank)
            request = group.all_reduce_init(tensor, op, algorithm=algorithm, prescale=2.0)
            for _ in range(3):
                tensor.copy_(draw(group.rank))
                close(start_and_wait(request), group.size, scale=2.0)

    run(way, 4, job)


@everywhere
@pytest.mark.parametrize("shared", [False, True])
def test_operator_of_whole_segments_gets_them_whole(way: str, shared: bool) -> None:
    op = Longest(shared=shared)

    def job(group: Group) -> None:
        inputs = torch.stack([draw(rank) for rank in range(group.size)])
        for algorithm in ("bruck", "psgpu", "psgpu#2", "pscpu#3", None):
            for segments in (SEGMENTS, None):
                tensor = draw(group.rank)
                group.all_reduce(tensor, op, algorithm=algorithm, segments=segments)
                # Values are copied: no rounding.
                assert torch.equal(tensor, longest(inputs, segments or (0, 1021)))
            tensors = list(draw(group.rank).split([7, 493, 521]))
            group.grouped_all_reduce(tensors, op, algorithm=algorithm)
            assert torch.equal(torch.cat(tensors), longest(inputs, (0, 7, 500, 1021)))

    run(way, 4, job)


@everywhere
@pytest.mark.parametrize("op", [TrimmedMean(), Longest()])
def test_reduce_scatter_is_the_slice_of_the_all_reduce(way: str, op: Reducer) -> None:
    def job(group: Group) -> None:
        whole = group.all_reduce(draw(group.rank, 12), op, postscale=0.5)
        piece = group.reduce_scatter(draw(group.rank, 12), op, postscale=0.5)
        assert torch.equal(piece, whole[4 * group.rank :][:4])

    run(way, 3, job)


@everywhere
def test_reductions_onto_single_ranks_are_refused(way: str) -> None:
    def job(group: Group) -> None:
        tensor, op = draw(group.rank), TrimmedMean()
        for call in (
            lambda: group.reduce(tensor, 0, op),
            lambda: group.reduce_to_owners([tensor], op),
            lambda: group.reduce_to_owners([tensor], op, owners=[0]),
        ):
            with pytest.raises(ValueError, match="needs all ranks: use all_reduce"):
                call()
        close(group.all_reduce(tensor, op), group.size)

    run(way, 3, job)


def test_auto_takes_one_that_can_unless_the_operator_names_another() -> None:
    class Wrong(TrimmedMean):
        def algorithm(self, nbytes: int, size: int) -> str:
            return "rd"

    def job(group: Group) -> None:
        tensor = draw(group.rank)
        for call in (group.all_reduce, lambda each, op: group.grouped_all_reduce([each], op)):
            with pytest.raises(ValueError, match=r"'rd' cannot carry TrimmedMean"):
                call(tensor, Wrong())
        close(group.all_reduce(tensor, TrimmedMean()), group.size)

    run_threads(3, job)


TORCH_NAMES = {"SUM": Sum, "AVG": Average, "MIN": Min, "MAX": Max, "PRODUCT": Product}


@everywhere
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torchs_name_of_an_operator_is_that_operator(way: str, name: str) -> None:
    named, ours = getattr(dist.ReduceOp, name), TORCH_NAMES[name]

    def job(group: Group) -> None:
        for op in (named, dist.ReduceOp(named)):
            for call in (group.all_reduce, group.reduce_scatter, group.reduce):
                want = call(draw(group.rank), op=ours)
                assert torch.equal(call(draw(group.rank), op=op), want)
            request = group.all_reduce_init(draw(group.rank), op)
            assert request.op is ours
            # Another rank may name it in the other way.
            mine = named if group.rank else ours
            assert torch.equal(
                group.all_reduce(draw(group.rank), mine), group.all_reduce(draw(group.rank), ours)
            )
        group.join([named])

    run(way, 2, job)


@pytest.mark.parametrize("op", [dist.ReduceOp.BAND, dist.ReduceOp.BXOR, dist.ReduceOp.PREMUL_SUM])
def test_other_operators_of_torch_are_refused_with_those_that_are_taken(op: Any) -> None:
    def job(group: Group) -> None:
        taken = f"SUM, AVG, MIN, MAX or PRODUCT of torch.distributed.ReduceOp, got {op.name}"
        for call in (
            lambda: group.all_reduce(torch.ones(2, dtype=torch.int64), op),
            lambda: group.check_algorithm("rd", op),
            lambda: hvd.allreduce(torch.ones(2), op=op),
            lambda: hvd.HookState(op=op),
        ):
            with pytest.raises(TypeError, match=taken):
                call()

    run_threads(1, job)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_infinity_in_a_complex_tensor_stays_in_its_part(dtype: torch.dtype) -> None:
    """Infinity times a complex number, such as 2 + 0i, has an imaginary part that is NaN."""

    def job(group: Group) -> None:
        one = torch.view_as_complex(torch.tensor([[torch.inf, 1.0], [2.0, 3.0]])).to(dtype)
        for tensor in (
            group.all_reduce(one.clone(), Sum, prescale=2.0, postscale=0.5),
            group.all_reduce(one.clone(), Average),
        ):
            assert as_real(tensor)[0].tolist()[0] == torch.inf
            assert not as_real(tensor).isnan().any()

    run_threads(2, job)
