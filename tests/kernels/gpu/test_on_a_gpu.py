"""What only a GPU can show: sizes, streams and devices at once, and other work beside a launch.

An H200 has run it. A launch that waits for another for ever would hang the
process, so what may is looked after from the host, with a time limit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import kernels
from kernels.gpu.device_tables import TABLES
from tests.kernels.cases import bits, random, relative_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SECONDS = 60.0
ROUNDS = 50
# More elements than an int32 counts, not a multiple of a vector.
HUGE = (1 << 31) + 4099
PIECE = 1 << 27
GIGABYTE = 1 << 30


def wait_for(streams: list[torch.cuda.Stream]) -> None:
    """Fail, where a synchronize would hang, if the streams have work left after SECONDS."""
    end = time.monotonic() + SECONDS
    while not all(stream.query() for stream in streams):
        assert time.monotonic() < end, f"work is left after {SECONDS} s"
        time.sleep(0.001)


def pair(numel: int, seed: int, device: str = "cuda", dtype: torch.dtype = torch.float32):
    return [random(numel, dtype, device, seed + k) for k in range(2)]


def calls(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor | list[Tensor]]]:
    """Every function of the package on the pair."""
    half = a.numel() // 2 + 1
    bounds = (0, 7, half, a.numel())
    return {
        "pack": lambda: kernels.pack([a, b], scale=0.5),
        "unpack": lambda: kernels.unpack(
            kernels.pack([a, b]), [torch.empty_like(a), torch.empty_like(b)]
        ),
        "sum_n": lambda: kernels.sum_n([a, b, a]),
        "scaled_add": lambda: kernels.scaled_add(a, b, alpha=0.3),
        "dot_and_norms": lambda: kernels.dot_and_norms(a, b, bounds),
        "combine": lambda: kernels.combine(a, b, kernels.dot_and_norms(a, b, bounds), bounds),
        "adasum": lambda: kernels.adasum(a, b, bounds),
        "adasum, two launches": lambda: kernels.adasum(a, b, bounds, cooperative=False),
        "gram, adasum_coefficients, weighted_sum": lambda: blended(a, b, bounds),
    }


def blended(a: Tensor, b: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """All launches of Adasum by a Gram matrix: nothing comes back to the host."""
    vectors, tree = [a, b, a - b], [(0, 1, 1, 1), (0, 2, 2, 1)]
    matrices = kernels.gram(vectors, bounds, precise=True)
    factors = kernels.adasum_coefficients(matrices[None], tree)
    return kernels.weighted_sum(vectors, factors, bounds)


def bits_of(value: Tensor | list[Tensor]) -> list[bytes]:
    return [bits(tensor) for tensor in (value if isinstance(value, list) else [value])]


def test_every_function_on_streams_that_overlap():
    """Scratch memory is a stream's own, so no launch disturbs another's counters."""
    numel = 100_003
    pairs = [pair(numel, seed) for seed in (1, 5, 9)]
    expected = [{name: bits_of(call()) for name, call in calls(*each).items()} for each in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    found = [{}, {}, {}]
    for _ in range(5):
        for stream, each, kept in zip(streams, pairs, found, strict=True):
            with torch.cuda.stream(stream):
                kept.update({name: call() for name, call in calls(*each).items()})
    wait_for(streams)
    for kept, wanted in zip(found, expected, strict=True):
        assert {name: bits_of(value) for name, value in kept.items()} == wanted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_on_a_device_that_is_not_the_current_one():
    first, second = (pair(100_003, 1, device) for device in ("cuda:0", "cuda:1"))
    wanted = {name: bits_of(call()) for name, call in calls(*first).items()}
    assert torch.cuda.current_device() == 0
    found = {name: bits_of(call()) for name, call in calls(*second).items()}
    assert found == wanted and torch.cuda.current_device() == 0
    plan = kernels.plan_adasum(*second)
    alone = kernels.adasum(*first)
    assert bits(plan()) == bits(alone) and torch.cuda.current_device() == 0


@pytest.mark.parametrize("numel", [1 << 10, 1 << 16, 1 << 20, 1 << 24])
def test_the_second_launch_combines_by_the_dots_of_the_first(numel):
    """Not by those of the run before, of other inputs, where both launches overlap."""
    pairs = [pair(numel, seed) for seed in (1, 5)]
    expected = [kernels.combine(*each, kernels.dot_and_norms(*each)) for each in pairs]
    a, b = (torch.empty_like(each) for each in pairs[0])
    plan = kernels.plan_adasum(a, b, cooperative=False)
    wrong = torch.zeros((), dtype=torch.int64, device=a.device)
    for _ in range(ROUNDS):
        for (one, other), result in zip(pairs, expected, strict=True):
            a.copy_(one)
            b.copy_(other)
            wrong += (plan().view(torch.int32) != result.view(torch.int32)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("cooperative", [True, False])
def test_adasum_beside_products_of_matrices(cooperative):
    """A cooperative launch waits for multiprocessors that a product has; the product ends."""
    a, b = pair(1 << 20, 1)
    expected = bits(kernels.adasum(a, b))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = square @ square
    again = torch.empty_like(product)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    plan = kernels.plan_adasum(a, b, cooperative=cooperative)
    for _ in range(ROUNDS):
        with torch.cuda.stream(streams[0]):
            torch.matmul(square, square, out=again)
        with torch.cuda.stream(streams[1]):
            plan()
    wait_for(streams)
    assert bits(plan.out) == expected
    assert relative_l2(again, product.double()) <= torch.finfo(torch.bfloat16).eps


def test_calls_captured_again_keep_nothing_more_and_replay_on_what_inputs_then_hold():
    """And the graphs before, whose tables each fills itself, still give the right bits."""
    a, b = pair(50_003, 1)
    # Compiling is no work for a capture: the same calls on other memory.
    for call in calls(a, b).values():
        call()
    # Tables that no call before the captures has made: of other tensors.
    c, d = (tensor.clone() for tensor in (a, b))
    # The others have addresses of what they make in tables.
    of_inputs = ("pack", "sum_n", "adasum", "adasum, two launches")
    graphs, grown = [], []
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = len(TABLES)
            results = {name: calls(c, d)[name]() for name in of_inputs}
            grown.append(len(TABLES) - before)
            results |= {name: call() for name, call in calls(c, d).items() if name not in results}
        graphs.append((graph, results))
    assert grown[0] > 0 and not any(grown[1:])
    for seed in (1, 7):
        for held, fresh in zip((c, d), pair(50_003, seed), strict=True):
            held.copy_(fresh)
        wanted = {name: bits_of(call()) for name, call in calls(*pair(50_003, seed)).items()}
        for graph, results in graphs:
            graph.replay()
            assert {name: bits_of(value) for name, value in results.items()} == wanted


def pieces(numel: int) -> Iterator[slice]:
    """The elements a piece at a time, so that their float64 copies fit."""
    for start in range(0, numel, PIECE):
        yield slice(start, min(start + PIECE, numel))


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def huge() -> Iterator[list[Tensor]]:
    """Three bfloat16 tensors of HUGE elements: two of values, one of NaN."""
    if free_memory() < 24 * GIGABYTE:
        pytest.skip("24 GiB of GPU memory are not free")
    generator = torch.Generator("cuda").manual_seed(1)
    a, b, out = (torch.empty(HUGE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in (a, b):
        tensor.normal_(generator=generator)
    yield [a, b, out.fill_(float("nan"))]
    del a, b, out, tensor
    torch.cuda.empty_cache()


# A bound past 2**31 that cuts a vector.
HUGE_BOUNDS = (0, (1 << 31) + 1, HUGE)


def test_adasum_of_more_than_2_31_elements(huge):
    a, b, out = huge
    kernels.adasum(a, b, HUGE_BOUNDS, out=out)
    eps = torch.finfo(torch.bfloat16).eps
    for low, high in itertools.pairwise(HUGE_BOUNDS):
        rows = torch.zeros(1, 3, dtype=torch.float64, device="cuda")
        for at in pieces(high - low):
            rows += kernels.dot_and_norms_reference(a[low:high][at], b[low:high][at])
        for at in pieces(high - low):
            x, y = a[low:high][at], b[low:high][at]
            expected = kernels.combine_reference(x, y, rows)
            error = (out[low:high][at].double() - expected).abs()
            # One rounding of the result, and far less before it.
            assert (error <= eps * (x.abs() + y.abs()).double()).all()


def test_elementwise_functions_of_more_than_2_31_elements(huge):
    a, b, out = huge
    kernels.sum_n([a, b], out=out)
    assert all(torch.equal(out[at], a[at] + b[at]) for at in pieces(HUGE))
    kernels.scaled_add(a, b, alpha=1.0, beta=-1.0, out=out)
    assert all(torch.equal(out[at], a[at] - b[at]) for at in pieces(HUGE))
    parts = [a[: HUGE - 5], a[HUGE - 5 :]]
    layout = kernels.layout_of(parts)
    if layout.numel > HUGE:
        out = torch.empty(layout.numel, device="cuda", dtype=torch.bfloat16)
    kernels.pack(parts, layout=layout, out=out[: layout.numel])
    back = [torch.empty_like(part) for part in parts]
    kernels.unpack(out[: layout.numel], back, layout=layout)
    for part, returned in zip(parts, back, strict=True):
        assert all(torch.equal(part[at], returned[at]) for at in pieces(part.numel()))
