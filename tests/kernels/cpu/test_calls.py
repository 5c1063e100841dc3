"""Arguments that C checks: verdicts, texts and bits are those of Python's checks."""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import kernels
from kernels.arguments import read
from kernels.binding import locate
from kernels.call import Call
from kernels.cpu import dispatch, native
from tests.kernels.cases import DTYPES, bits, random
from tests.kernels.cpu.cases import need_compiled
from tests.kernels.test_plain_tensors import Subclass, fake, resized

Shape = tuple[int, ...]
SHAPE: Shape = (6, 4)
# Where tensors are made: tests/pretended_gpu/test_reading.py has its own.
DEVICE = "cpu"


def like(seed: int, dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> Tensor:
    return random(shape, dtype, DEVICE, seed)


def made_in_inference_mode(shape: Shape) -> Tensor:
    with torch.inference_mode():
        return like(7, shape=shape)


def within(whole: Tensor, shape: Shape, start: int) -> Tensor:
    """The elements of a flat tensor from one of them on, in this shape."""
    return whole[start : start + math.prod(shape)].view(shape)


def negative_by_conjugation(shape: Shape) -> Tensor:
    """Contiguous, of what is two elements apart."""
    numbers = torch.ones(math.prod(shape), dtype=torch.complex64).conj().imag
    return numbers.as_strided(shape, torch.ones(shape).stride())


def shrunk(shape: Shape, elements: int) -> Tensor:
    """At an offset of 4, in a storage that has room for all but so many elements at its end."""
    part = within(torch.ones(math.prod(shape) + 4), shape, 4)
    return resized(part, 4 * (part.numel() + 4 - elements))


# In the place of one tensor of a call, of this shape if it has one; whether C runs what reads it.
STAND_INS: dict[str, tuple[Callable[[Shape], Any], bool]] = {
    "plain": (lambda s: like(7, shape=s), True),
    "parameter": (lambda s: torch.nn.Parameter(like(7, shape=s), requires_grad=False), True),
    "at an offset": (lambda s: within(torch.arange(1100.0), s, 3), True),
    "end of its storage": (lambda s: shrunk(s, 0), True),
    "copied on write": (lambda s: torch._lazy_clone(like(7, shape=s)), True),
    "inference": (made_in_inference_mode, True),
    "follows a gradient": (lambda s: torch.nn.Parameter(like(7, shape=s)), False),
    "no leaf": (lambda s: torch.nn.Parameter(like(7, shape=s)) * 2, False),
    "float64": (lambda s: like(7, torch.float64, s), False),
    "bfloat16": (lambda s: like(7, torch.bfloat16, s), False),
    "integers": (lambda s: torch.ones(s, dtype=torch.int32), False),
    "complex": (lambda s: torch.ones(s, dtype=torch.complex64), False),
    "float8": (lambda s: torch.ones(s).to(torch.float8_e4m3fn), False),
    "bools": (lambda s: torch.ones(s, dtype=torch.bool), False),
    "shorter": (lambda s: torch.ones(s)[1:], False),
    "more dimensions": (lambda s: torch.ones(*s, 1), False),
    "0-d": (lambda s: torch.ones(()), False),
    "empty": (lambda s: torch.ones(0), False),
    "strided": (lambda s: torch.ones(*s, 2)[..., 0], False),
    "expanded": (lambda s: torch.ones(1).expand(s), False),
    "permuted": (lambda s: like(7, shape=s[::-1]).permute(*range(len(s))[::-1]), False),
    "negative": (lambda s: torch._neg_view(like(7, shape=s)), False),
    "negative by conjugation": (negative_by_conjugation, False),
    "sparse": (lambda s: like(7, shape=s).to_sparse(), False),
    "mkldnn": (lambda s: like(7, shape=s).to_mkldnn(), False),
    "nested": (lambda s: torch.nested.nested_tensor([torch.ones(5), torch.ones(3)]), False),
    "quantized": (lambda s: torch.quantize_per_tensor(torch.ones(s), 1, 0, torch.qint8), False),
    "meta": (lambda s: torch.ones(s, device="meta"), False),
    "fake": (lambda s: fake(), False),
    "subclass": (lambda s: torch.ones(s).as_subclass(Subclass), False),
    "zeros of torch": (lambda s: torch._efficientzerotensor(s), False),
    "part of torch's zeros": (lambda s: within(torch._efficientzerotensor(1100), s, 3), False),
    "too short": (lambda s: shrunk(s, 1), False),
    "emptied": (lambda s: resized(torch.ones(s), 0), False),
    "array": (lambda s: torch.ones(s).numpy(), False),
    "list": (lambda s: [1.0], False),
    "none": (lambda s: None, False),
}
# Name: what it is called with, of which each tensor is replaced in turn.
CALLS: dict[str, Callable[..., Any]] = {
    "sum_n": lambda a, b, c, out: kernels.sum_n([a, b, c], out=out),
    "sum_n as a tree": lambda a, b, c, out: kernels.sum_n([a, b, c], out=out, order="tree"),
    "sum_n with found_inf": lambda a, b, c, out: [
        kernels.sum_n([a, b], out=out, found_inf=c, scale=1e39), c
    ],
    "scaled_add": lambda a, b, c, out: kernels.scaled_add(a, b, beta=0.5, out=out),
    "dot_and_norms": lambda a, b, c, out: kernels.dot_and_norms(a, b, (0, 5, 5, 24)),
    "combine": lambda a, b, c, out: kernels.combine(a, b, c, (0, 5, 24), out=out),
    "adasum": lambda a, b, c, out: kernels.adasum(a, b, [0, 24], out=out),
    "gram": lambda a, b, c, out: kernels.gram([a, b, c], out=out),
    "precise gram": lambda a, b, c, out: kernels.gram([a, b, c], (0, 7, 24), precise=True, out=out),
    "weighted_sum": lambda a, b, c, out: kernels.weighted_sum([a, b], c, (0, 24), out=out),
    "pack": lambda a, b, c, out: kernels.pack([a, b, c], layout=layout(), out=out),
    "pack with found_inf": lambda a, b, c, out: [
        kernels.pack([a, b], layout=layout(2), out=out, found_inf=c), c
    ],
    "unpack": lambda a, b, c, out: kernels.unpack(out, [a, b, c], layout=layout()),
    "sum_n of many": lambda a, b, c, out: kernels.sum_n([a, *several(), b, c], out=out),
    "pack of many": lambda a, b, c, out: kernels.pack(
        [a, *several(), b, c], layout=layout(32), out=out
    ),
    "unpack of many": lambda a, b, c, out: kernels.unpack(
        out, [a, b, *several(), c], layout=layout(32)
    ),
}  # fmt: skip
# Places of tensors for which a stand-in that can be read is taken, where not all of (a, b, c, out),
# and the shapes and dtypes of c and out where these are not those of a.
PLACES: dict[str, tuple[int, ...]] = {
    "scaled_add": (0, 1, 3), "dot_and_norms": (0, 1), "combine": (0, 1, 3), "adasum": (0, 1, 3),
    "gram": (0, 1, 2), "precise gram": (0, 1, 2), "weighted_sum": (0, 1, 3),
}  # fmt: skip
SHAPES: dict[str, dict[int, tuple[Shape, torch.dtype]]] = {
    "sum_n with found_inf": {2: ((1,), torch.float32)},
    "combine": {2: ((2, 3), torch.float64)},
    "gram": {3: ((1, 3, 3), torch.float64)},
    "precise gram": {3: ((2, 3, 3, 2), torch.float64)},
    "weighted_sum": {2: ((1, 2), torch.float64)},
    "pack": {3: ((96,), torch.float32)},
    "pack with found_inf": {2: ((1,), torch.float32), 3: ((64,), torch.float32)},
    "unpack": {3: ((96,), torch.float32)},
    "pack of many": {3: ((1024,), torch.float32)},
    "unpack of many": {3: ((1024,), torch.float32)},
}


@functools.cache
def layout(count: int = 3) -> kernels.Layout:
    return kernels.layout_of([like(seed) for seed in range(count)], alignment=64)


def several() -> list[Tensor]:
    """More tensors, which make a list long enough to be asked for its storages at once."""
    return [like(seed) for seed in range(29)]


def arguments(function: str) -> list[Any]:
    """Three tensors to read, or of `unpack` to write, and what is written, or of `unpack` read."""
    given, others = [like(seed) for seed in (1, 2, 3, 4)], SHAPES.get(function, {})
    for place, (shape, dtype) in others.items():
        given[place] = like(place + 1, dtype, shape).abs()
    return given


def is_written(function: str, place: int) -> bool:
    if "unpack" in function:
        return place != 3
    return place == 3 or (place == 2 and "found_inf" in function)


class Asked:
    """Which calls C decided, of those that it runs and of those that it only reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        need_compiled()
        if sys.version_info < (3, 11):
            pytest.skip("C does not read the arguments in Python 3.10")
        library = dispatch.library()
        assert library is not None and set(library.calls) == set(native.READ)
        self.library, self.monkeypatch = library, monkeypatch
        # By what runs, or at least by what reads.
        self.decided = self.read = False
        self.ways = {"calls": library.calls, "reads": library.reads}

    def outcome(self, call: Callable[[], Any], way: str) -> tuple[Any, ...]:
        """What a call returns or raises, by C in one of two ways or without; sets `decided`."""
        self.decided = False
        with self.monkeypatch.context() as patch:
            for name, calls in self.ways.items():
                noted = {each: self.noting(one) for each, one in calls.items()}
                patch.setattr(self.library, name, noted if name == way else {})
            try:
                found = call()
            except (TypeError, ValueError, RuntimeError) as error:
                return type(error), str(error)
        return tuple([(one.dtype, one.shape, bits(one)) for one in self.listed(found)])

    def noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            found = call(*arguments)
            self.decided |= found is not None
            return found

        return noted

    @staticmethod
    def listed(found: Any) -> list[Tensor]:
        assert isinstance(found, (Tensor, list))
        listed = [found] if isinstance(found, Tensor) else found
        dense = torch.contiguous_format
        return [one.detach().clone(memory_format=dense) for one in listed if one is not None]

    def same(self, make: Callable[[], Callable[[], Any]]) -> tuple[Any, ...]:
        """The outcome of a call, which is the same with C and without it."""
        expected = self.outcome(make(), "")
        assert self.outcome(make(), "reads") == expected
        self.read = self.decided
        assert self.outcome(make(), "calls") == expected
        assert self.read or not self.decided
        if self.decided:
            assert expected and not isinstance(expected[0], type)
        return expected


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("kind", STAND_INS)
@pytest.mark.filterwarnings("ignore")
def test_each_tensor_of_each_call(asked: Asked, function: str, kind: str) -> None:
    stand_in, read = STAND_INS[kind]
    for place in range(4):

        def make(place: int = place) -> Callable[[], Any]:
            given = arguments(function)
            given[place] = stand_in(given[place].shape)
            return functools.partial(CALLS[function], *given)

        asked.same(make)
        written = is_written(function, place)
        used = place in PLACES.get(function, range(4))
        if read and used and not (written and kind == "inference"):
            assert asked.decided, place


@pytest.mark.parametrize("function", CALLS)
def test_without_gradients_parameters_are_taken(asked: Asked, function: str) -> None:
    def make() -> Callable[[], Any]:
        *given, out = arguments(function)
        return functools.partial(CALLS[function], *map(torch.nn.Parameter, given), out)

    assert asked.same(make)[0] is ValueError or function.split()[0] in (
        "sum_n",
        "scaled_add",
        "pack",
    )
    with torch.no_grad():
        asked.same(make)
    assert asked.decided


@pytest.mark.parametrize("function", CALLS)
def test_modes_of_torch(asked: Asked, function: str) -> None:
    def make() -> Callable[[], Any]:
        return functools.partial(CALLS[function], *arguments(function))

    with torch.inference_mode():
        asked.same(make)
        assert asked.decided
    with forward_ad.dual_level():
        asked.same(make)
        assert not asked.decided

        def dual() -> Callable[[], Any]:
            first, *others = arguments(function)
            return functools.partial(CALLS[function], forward_ad.make_dual(first, like(5)), *others)

        asked.same(dual)
    x = random((2, *SHAPE), torch.float32, "cpu", 9)

    def mapped() -> Callable[[], Any]:
        _, *others = arguments(function)
        return lambda: torch.vmap(lambda a: CALLS[function](a, *others))(x)

    asked.same(mapped)


@pytest.mark.parametrize("function", CALLS)
def test_all_tensors_permuted(asked: Asked, function: str) -> None:
    def make() -> Callable[[], Any]:
        given = [one.t().contiguous().t() if one.dim() == 2 else one for one in arguments(function)]
        return functools.partial(CALLS[function], *given)

    asked.same(make)
    # What `unpack` writes, and copies then, is contiguous.
    decided = {"sum_n", "sum_n as a tree", "sum_n with found_inf", "scaled_add", "adasum", "gram"}
    decided |= {"weighted_sum", "unpack", "unpack of many"}
    assert asked.decided == (function in decided)


def overlapping(first: int, second: int, written: int) -> list[Tensor]:
    """Tensors of which two share a part of their memory."""
    given, whole = arguments("sum_n"), torch.arange(30.0)
    given[first], given[second] = within(whole, SHAPE, 0), within(whole, SHAPE, written)
    return given


@pytest.mark.parametrize("function", ["sum_n", "scaled_add", "adasum"])
@pytest.mark.parametrize("shift", [0, 1, 6])
def test_overlap(asked: Asked, function: str, shift: int) -> None:
    for first, second in ((0, 1), (0, 3), (1, 3)):

        def make(first: int = first, second: int = second) -> Callable[[], Any]:
            return functools.partial(CALLS[function], *overlapping(first, second, shift))

        asked.same(make)
        assert asked.decided == (shift == 0 or second != 3)


def test_overlap_with_a_buffer_and_within_a_list(asked: Asked) -> None:
    one, step = layout(), layout().offsets[1]

    def packed(at: int) -> Callable[[], Any]:
        buffer = torch.arange(float(one.numel + 24))
        inside = within(buffer, SHAPE, at)
        return lambda: kernels.pack([like(1), inside, like(3)], layout=one, out=buffer[: one.numel])

    def unpacked(at: int) -> Callable[[], Any]:
        whole = torch.arange(100.0)
        parts = [within(whole, SHAPE, place) for place in (30, 0, at)]
        return lambda: kernels.unpack(torch.ones(one.numel), parts, layout=one)

    for at in (0, step, one.numel - 1, one.numel):
        asked.same(functools.partial(packed, at))
        assert asked.decided == (at == one.numel)
    for at in (0, 23, 24, 31, 53, 54, 60):
        asked.same(functools.partial(unpacked, at))
        assert asked.decided == (at >= 54)


SEGMENTS: list[tuple[Any, bool]] = [
    (None, True), ((0, 24), True), ([0, 24], True), ((0, 0, 3, 3, 24, 24), True),
    ((0, 25), False), ((1, 24), False), ((0,), False), ((), False), ((0, 9, 8, 24), False),
    ((0, 2.0, 24), False), ((0, True, 24), False), ((0, -1, 24), False), ((0, 2**70, 24), False),
    ((24,), False), (torch.tensor([0, 24]), False), ("024", False), (range(0, 25, 24), False),
    (24, False),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SEGMENTS)))
@pytest.mark.parametrize("function", ["dot_and_norms", "adasum"])
def test_segments(asked: Asked, function: str, number: int) -> None:
    segments, decided = SEGMENTS[number]
    asked.same(lambda: lambda: getattr(kernels, function)(like(1), like(2), segments))
    assert asked.decided == decided


@pytest.mark.parametrize("function", CALLS)
def test_lists_of_other_kinds(asked: Asked, function: str) -> None:
    one, tensors = layout(), [like(1), like(2), like(3)]
    several: list[Any] = [tensors, tuple(tensors), [], (), tensors[:2], tensors[0]]
    several += [{"a": tensors[0]}, None, torch.stack(tensors), type("L", (list,), {})(tensors)]
    calls: dict[str, Callable[[Any], Any]] = {
        "sum_n": kernels.sum_n,
        "pack": lambda given: kernels.pack(given, layout=one),
        "unpack": lambda given: kernels.unpack(torch.ones(one.numel), given, layout=one),
    }
    if function in calls:
        for given in several:
            asked.same(lambda given=given: lambda: calls[function](given))
            assert asked.decided == (
                (type(given) in (list, tuple) and len(given) == 3)
                or (function == "sum_n" and given == tensors[:2])
            )


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_dtypes_and_options(asked: Asked, source: torch.dtype, target: torch.dtype) -> None:
    a, b = like(1, source), like(2, source)
    one = kernels.layout_of([a, b], dtype=target)
    options: list[dict[str, Any]] = [
        {}, {"dtype": target}, {"out": like(3, target)}, {"found_inf": torch.zeros(())},
        {"dtype": target, "out": like(3, source)}, {"found_inf": torch.zeros((), dtype=source)},
        {"dtype": torch.int32}, {"dtype": "float32"}, {"out": like(3, target)[:3]},
    ]  # fmt: skip
    sums = [{"order": "tree"}, {"order": "flat"}, {"order": None}, {"accumulate": source}]
    sums += [{"order": "list", "dtype": target, "accumulate": source}]
    for given in options:
        asked.same(lambda given=given: lambda: kernels.sum_n([a, b], scale=1 / 3, **given))
        asked.same(lambda given=given: lambda: kernels.scaled_add(a, b, alpha=2.0, **given))
    for given in sums:
        asked.same(lambda given=given: lambda: kernels.sum_n([a, b], **given))
        assert asked.decided == (given.get("order", "list") in ("list", "tree"))
    asked.same(lambda: lambda: kernels.scaled_add(a, like(2, target)))
    asked.same(lambda: lambda: kernels.adasum(a, like(2, target), out=like(3, target)))
    asked.same(lambda: lambda: kernels.pack([a, b], layout=one, scale=0.3))
    assert asked.decided
    buffer = random(one.numel, target, "cpu", 4)
    asked.same(lambda: lambda: kernels.unpack(buffer, [a.clone(), b.clone()], layout=one))
    assert asked.decided
    wrong = random(one.numel, source, "cpu", 4)
    asked.same(lambda: lambda: kernels.pack([a, b], layout=one, out=wrong))
    for other in (kernels.layout_of([a]), kernels.layout_of([a, b[1:]], dtype=target), 3):
        asked.same(lambda other=other: lambda: kernels.pack([a, b], layout=other))
        assert not asked.decided


def test_what_is_written_is_seen_by_autograd_and_not_by_others() -> None:
    need_compiled()
    x, saved = torch.ones(4, requires_grad=True), torch.ones(4)
    product = (x * saved).sum()
    version = saved._version
    kernels.sum_n([saved.clone(), saved.clone()], out=saved)
    assert saved._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    original = torch.zeros(4)
    lazy = torch._lazy_clone(original)
    kernels.sum_n([torch.ones(4), torch.ones(4)], out=lazy)
    assert lazy.tolist() == [2.0] * 4 and original.tolist() == [0.0] * 4
    parts = [torch.zeros(3), torch.zeros(3)]
    one = kernels.layout_of(parts)
    kernels.unpack(torch.ones(one.numel), parts, layout=one)
    assert [part._version for part in parts] == [1, 1]
    a, buffer = torch.ones(3), kernels.pack([torch.ones(3)])
    for written, call in (
        (a, lambda: kernels.scaled_add(a, parts[0], out=a)),
        (a, lambda: kernels.adasum(a, parts[0], out=a)),
        (buffer, lambda: kernels.pack([a], layout=kernels.layout_of([a]), out=buffer)),
    ):
        before = written._version
        call()
        assert written._version > before


@pytest.mark.parametrize("numel", [8193, 100_003])
def test_more_than_one_block_and_thread(asked: Asked, numel: int) -> None:
    a, b = (random(numel, torch.float32, "cpu", seed) for seed in (1, 2))
    cuts, one = (0, 7, 7, 5000, numel), kernels.layout_of([a, b])
    calls: list[Callable[[], Any]] = [
        lambda: kernels.dot_and_norms(a, b, cuts),
        lambda: kernels.adasum(a, b, cuts, weights=(3, 1)),
        lambda: kernels.sum_n([a, b, a]),
        lambda: kernels.pack([a, b], layout=one),
    ]
    for call in calls:
        asked.same(lambda call=call: call)
        assert asked.decided


def test_no_references_are_kept() -> None:
    need_compiled()
    a, b, out, cuts = like(1), like(2), like(3), (0, 24)
    given = [a, b]
    one = kernels.layout_of(given)
    buffer = torch.empty(one.numel)
    plan, found = kernels.plan_pack(given, layout=one, out=buffer), torch.zeros(())
    with_found = kernels.plan_pack(given, layout=one, out=buffer, found_inf=found)
    watched = [a, b, out, cuts, given, buffer, found, None, torch.float32, True]

    def many() -> None:
        for _ in range(200):
            kernels.sum_n(given, out=out)
            kernels.dot_and_norms(a, b, cuts)
            kernels.pack(given, layout=one, out=buffer)
            kernels.unpack(buffer, given, layout=one, found_inf=found)
            kernels.gram(given, cuts, precise=True)
            plan.rebind(given)
            with_found.rebind(given)
            for wrong in (lambda: kernels.sum_n([a, buffer]), lambda: kernels.adasum(a, b, [1])):
                with pytest.raises(ValueError):
                    wrong()

    many()
    gc.collect()
    before = [*map(sys.getrefcount, watched)]
    many()
    gc.collect()
    after = [*map(sys.getrefcount, watched)]
    assert all(abs(new - old) < 100 for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("shifted", [None, 0, 1, 2])
def test_alignment_is_that_of_inputs_and_output(asked: Asked, shifted: int | None) -> None:
    given = [within(torch.arange(40.0), SHAPE, 4 + (i == shifted)) for i in range(3)]
    by_c = read("sum_n", given[:2], given[2], None, None, None, None, "list")
    by_python = Call("sum_n", given[:2], given[2], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked.library, "reads", {})
        locate(by_python)
    assert by_c is not None
    assert by_c.addresses == by_python.addresses
    assert by_c.aligned == by_python.aligned == (shifted is None)
