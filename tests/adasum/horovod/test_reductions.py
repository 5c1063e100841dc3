"""Horovod's functions on tensors. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import adasum as hvd
from adasum import Compression
from collectives import run_threads
from tests.adasum.definition import relative_error, tolerance


def _draw(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _each(size: int, fn: Callable[[int], Any]) -> list[Any]:
    return run_threads(size, lambda group: fn(group.rank))


def test_in_place_functions_return_their_argument() -> None:
    def run(rank: int) -> None:
        want = _draw(0, 5) + _draw(1, 5)
        for form in (hvd.allreduce_, lambda t, **k: hvd.synchronize(hvd.allreduce_async_(t, **k))):
            tensor = _draw(rank, 5)
            assert form(tensor, op=hvd.Sum) is tensor
            assert relative_error(tensor, want) <= tolerance(torch.float32)
        tensors = [_draw(rank, 5), _draw(rank, 5)]
        assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[1] is tensors[1]
        handle = hvd.grouped_allreduce_async_([_draw(rank, 5)], op=hvd.Sum)
        assert relative_error(hvd.synchronize(handle)[0], want) <= tolerance(torch.float32)
        assert hvd.poll(handle)
        parameter = torch.nn.Parameter(_draw(rank, 5))
        hvd.allreduce_(parameter, op=hvd.Sum)
        assert relative_error(parameter.detach(), want) <= tolerance(torch.float32)

    _each(2, run)


def test_allreduce_with_deprecated_average_warns_and_works() -> None:
    def run(rank: int) -> torch.Tensor:
        return hvd.allreduce(torch.full((2,), 3.0), average=False)

    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert torch.equal(_each(2, run)[0], torch.full((2,), 6.0))
    with pytest.raises(ValueError, match="supersedes average"):
        _each(1, lambda rank: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_allreduce_with_compression_keeps_the_dtype(compression: Any, dtype: torch.dtype) -> None:
    def run(rank: int) -> torch.Tensor:
        return hvd.allreduce(_draw(rank, 50, dtype=torch.float64), compression=compression)

    want = (_draw(0, 50, dtype=torch.float64) + _draw(1, 50, dtype=torch.float64)) / 2
    result = _each(2, run)[0]
    assert result.dtype == torch.float64
    # Half an eps from the cast, and one each from sum and division, relative to the inputs.
    error = (result - want).norm() / _draw(0, 50, dtype=torch.float64).norm()
    assert 0 < error <= 4 * torch.finfo(dtype).eps
    integers = torch.arange(3)
    assert compression.compress(integers)[0] is integers
    half = torch.zeros(2, dtype=torch.float16)
    assert compression.compress(half)[0] is half


@pytest.mark.parametrize("size", [1, 2, 3])
def test_integers_keep_their_dtype_and_round_towards_zero(size: int) -> None:
    """As Horovod's: a factor multiplies in float64, and what it makes is truncated."""

    def run(rank: int) -> None:
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
            sign = 1 if dtype == torch.uint8 else -1
            rows = torch.tensor([7, sign * 5, 3], dtype=dtype)
            tensor = torch.stack([rows] * size)
            calls: list[Callable[..., torch.Tensor]] = [
                hvd.allreduce,
                lambda t, **options: hvd.grouped_allreduce([t], **options)[0],
                lambda t, **options: hvd.allreduce_(t.clone(), **options),
                hvd.reducescatter,
                lambda t, **options: hvd.grouped_reducescatter([t], **options)[0],
                lambda t, **options: hvd.reducescatter_async(t, **options).wait(),
            ]
            for call in calls:
                mean = call(tensor, op=hvd.Average)
                assert mean.dtype == dtype and torch.equal(mean, tensor[: len(mean)])
                got = call(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
                assert got.dtype == dtype
                # 7, -5 and 3 become 3, -2 and 1 in every rank.
                want = [int(1.5 * size * each) for each in (3, sign * 2, 1)]
                assert got.tolist() == [want] * len(got)
        odd = torch.full((size,), 2**24 + 1)
        assert hvd.reducescatter(odd, op=hvd.Sum).tolist() == [size * (2**24 + 1)]
        assert hvd.reducescatter(odd, op=hvd.Sum, prescale_factor=3.0).tolist() == [
            3 * size * (2**24 + 1)
        ]
        apart = torch.tensor([rank + 1, -rank - 1])
        total = size * (size + 1) // 2
        assert hvd.allreduce(apart).tolist() == [total // size, -(total // size)]

    _each(size, run)


def test_factors_that_differ_between_ranks_raise_on_every_rank() -> None:
    def run(rank: int) -> None:
        for function in (hvd.allreduce, hvd.reducescatter):
            for factor in ("prescale_factor", "postscale_factor"):
                with pytest.raises(hvd.CollectiveMismatchError, match=factor[:8]):
                    function(torch.ones(4), op=hvd.Sum, **{factor: 1.0 + rank})
        hvd.barrier()

    _each(2, run)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hvd.allreduce([1.0]), TypeError, "must be a torch.Tensor, got list"),
        (lambda: hvd.allreduce(torch.ones(2), op="sum"), TypeError, "op must be Sum, Average"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), TypeError, "to_dense"),
        (lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum), TypeError, "torch.int32"),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor="a"), TypeError, "^prescale_factor"),
        (
            lambda: hvd.reducescatter(torch.ones(2), postscale_factor=float("nan")),
            ValueError,
            "^postscale_factor must be finite",
        ),
        (lambda: hvd.allreduce_(torch.ones(2, 2).t()[:1].expand(3, 2)), ValueError, "contiguous"),
        (lambda: hvd.allreduce(torch.ones(2), process_set=1), TypeError, "process_set"),
        (lambda: hvd.barrier(process_set=1), TypeError, "process_set"),
        (lambda: hvd.broadcast(torch.ones(2), 7), ValueError, "7"),
        (
            lambda: hvd.allreduce(torch.ones(2, requires_grad=True), op=hvd.Max),
            NotImplementedError,
            "gradients through allreduce with op=Max are not supported: .*detach",
        ),
        (
            lambda: hvd.sparse_allreduce_async(
                torch.eye(2).to_sparse().requires_grad_(), "a", hvd.Sum
            ),
            NotImplementedError,
            "gradients through sparse_allreduce_async",
        ),
        (lambda: hvd.init(comm=[0]), NotImplementedError, "comm"),
        (lambda: hvd.init(process_sets=[0]), TypeError, "ranks"),
        (lambda: hvd.init(process_sets="static"), ValueError, "dynamic"),
    ],
)
def test_functions_with_bad_arguments_raise(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        _each(1, lambda rank: call())


def test_functions_before_init_raise() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.barrier):
        with pytest.raises(RuntimeError, match="init"):
            call()
