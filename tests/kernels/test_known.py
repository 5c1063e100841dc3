"""Calls that passed the checks before: recognised, and nothing else taken for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _known, packed_list, packing, projection, reduction
from kernels._known import KnownCalls

SHAPES = [(8, 4), (8,), (), (3, 5)]


def tensors(*, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


pytestmark = pytest.mark.usefixtures("nothing_known")
REFUSED = ("None", "complex", "strided", "negative", "sparse", "meta", "nested")
FUNCTIONS = ["pack", "unpack", "sum_n", "scaled_add", "dot_and_norms", "combine", "adasum"]
ELEMENTWISE = ["sum_n", "scaled_add", "combine", "adasum"]
CHOICES: list[tuple[str, ...]] = [(), ("out",), ("found_inf",), ("out", "found_inf")]
Operands = dict[str, Any]


def good(function: str, layout: kernels.Layout, optional: tuple[str, ...] = ()) -> Operands:
    """A call's tensors, by what they are to it."""
    if function in ("pack", "unpack"):
        given: Operands = {f"tensors{i}": tensor for i, tensor in enumerate(tensors())}
        buffer = "out" if function == "pack" else "buffer"
        whole = {buffer: torch.randn(layout.numel)}
    else:
        count = len(SHAPES) if function == "sum_n" else 2
        given = {f"tensors{i}": torch.randn(8, 4) for i in range(count)}
        whole = {"out": torch.randn(8, 4)}
    if function == "combine":
        given["dots"] = torch.ones(1, 3, dtype=torch.float64)
    whole["found_inf"] = torch.zeros(1)
    if function == "dot_and_norms":
        whole.clear()
    chosen = {name: whole[name] for name in whole if name in ("buffer", *optional)}
    return given | chosen


def run(function: str, layout: kernels.Layout | None, given: Operands) -> Any:
    others = dict(given)
    listed = [others.pop(name) for name in given if name.startswith("tensors")]
    if function == "pack":
        return kernels.pack(listed, layout=layout, **others)
    if function == "unpack":
        return kernels.unpack(others.pop("buffer"), listed, layout=layout, **others)
    if function == "sum_n":
        return kernels.sum_n(listed, **others)
    if function == "combine":
        return kernels.combine(*listed, others.pop("dots"), **others)
    return getattr(kernels, function)(*listed, **others)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """From its call on, to check is an error; True: where things lie, too."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("checked anew")

    def forbid(places: bool) -> None:
        if _known._guards is None:
            pytest.skip("this torch has no TensorGuards")
        monkeypatch.setattr(packing, "check_packed", fail)
        monkeypatch.setattr(reduction, "_check_equals", fail)
        for module in (packing, reduction, projection):
            for name in ("check_tensor", "check_pair", "check_found_inf", "check_segments"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fail)
        if places:
            monkeypatch.setattr(_known, "check_written", fail)
            monkeypatch.setattr(packed_list, "check_apart", fail)

    return forbid


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("with_layout", [True, False], ids=["layout", "no layout"])
@pytest.mark.parametrize("optional", CHOICES)
def test_the_third_call_reads_no_attributes(
    function: str, with_layout: bool, optional: tuple[str, ...], unchecked: Callable[[bool], None]
) -> None:
    made = kernels.layout_of(tensors())
    layout = made if with_layout else None
    given = good(function, made, optional)
    for _ in range(2):
        run(function, layout, given)
    unchecked(True)
    run(function, layout, given)
    if function in ("pack", "unpack", "sum_n"):
        del given["tensors0"]
        with pytest.raises(AssertionError, match="checked anew"):
            run(function, layout, given)


@pytest.mark.parametrize("function", ELEMENTWISE)
@pytest.mark.parametrize("place", [0, 1])
def test_an_output_that_is_an_input_is_known_too(
    function: str, place: int, unchecked: Callable[[bool], None]
) -> None:
    made = kernels.layout_of(tensors())
    given = good(function, made)
    given["out"] = given[f"tensors{place}"]
    for _ in range(3):
        assert run(function, None, given) is given["out"]
    # Neither says anything of another place.
    for other in (1 - place, None):
        apart = good(function, made)
        apart["out"] = torch.empty(8, 4) if other is None else apart[f"tensors{other}"]
        mine = {name: tensor.clone() for name, tensor in apart.items() if name != "out"}
        assert torch.equal(run(function, None, apart), run(function, None, mine))
    unchecked(True)
    run(function, None, given)


def inference(good: Tensor) -> Tensor:
    with torch.inference_mode():
        return good.clone()


def retyped(good: Tensor) -> Tensor:
    tensor = good.clone()
    tensor.data = tensor.data.to(torch.int32)
    return tensor


def nested(_: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])


class Shapeless(Tensor):
    """No call with one of these is kept, and what it says of its shape is not asked."""

    @property
    def shape(self) -> Any:
        return [8, 4]


def transposed(_: Tensor) -> Tensor:
    return torch.ones(4, 8).t_()


# Made from the tensor in whose place they come.
BAD: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda _: None,
    "array": lambda good: good.numpy(),
    "dtype": lambda good: good.to(torch.int32),
    "complex": lambda good: good.to(torch.complex64),
    "retyped in place": retyped,
    "shape": lambda good: torch.ones(4, 8),
    "more dimensions": lambda good: good.unsqueeze(-1),
    "fewer elements": lambda good: good.view(-1)[:-1],
    "strided": lambda good: torch.stack([good, good], -1)[..., 0],
    "transposed": lambda good: torch.ones(4, 8).t(),
    "transposed in place": transposed,
    "expanded": lambda good: torch.ones(8, 1).expand(8, 4),
    "negative": torch._neg_view,
    "sparse": Tensor.to_sparse,
    # A guard that is asked about one ends the process.
    "nested": nested,
    "uninitialised": lambda _: torch.nn.parameter.UninitializedParameter(),
    "subclass": lambda good: good.as_subclass(Shapeless),
    "meta": lambda good: good.to("meta"),
    "other float": Tensor.half,
    "double": Tensor.double,
    "inference": inference,
    "parameter": torch.nn.Parameter,
    "needs grad": lambda good: good.clone().requires_grad_(),
}


def outcome(function: str, layout: kernels.Layout | None, given: Operands) -> Any:
    """The error, or the numbers."""
    try:
        found = run(function, layout, given)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return [tensor.tolist() for tensor in (found if isinstance(found, list) else [found])]


@pytest.mark.parametrize("optional", CHOICES)
@pytest.mark.parametrize("with_layout", [True, False], ids=["layout", "no layout"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", BAD)
def test_what_differs_is_answered_as_if_it_came_first(
    function: str,
    bad: str,
    with_layout: bool,
    optional: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if function == "dot_and_norms" and optional:
        return
    made = kernels.layout_of(tensors())
    layout = made if with_layout else None
    for place in good(function, made, optional):
        given = good(function, made, optional)
        given[place] = BAD[bad](given[place])
        with monkeypatch.context() as context:
            context.setattr(_known, "_guards", None)
            copies = {
                name: operand if name == place else operand.clone()
                for name, operand in given.items()
            }
            expected = outcome(function, layout, copies)
        for _ in range(4):
            run(function, layout, good(function, made, optional))
        for _ in range(2):
            again = {
                name: operand if name == place else operand.clone()
                for name, operand in given.items()
            }
            assert outcome(function, layout, again) == expected, place
        run(function, layout, good(function, made, optional))
        if bad in REFUSED and place == "tensors0":
            assert isinstance(expected, tuple)


def test_what_the_tensors_are_to_the_call_counts() -> None:
    a, b, c = (torch.randn(1) for _ in range(3))
    for _ in range(4):
        kernels.sum_n([a, b], dtype=torch.float64)
    with pytest.raises(TypeError, match="drop one of them"):
        kernels.sum_n([a, b], out=a, dtype=torch.float64)
    calls: KnownCalls[int] = KnownCalls()
    roles: list[tuple[list[Tensor], tuple[Tensor | None, ...], Tensor | None]] = [
        ([a, b, c], (), None),
        ([a, b], (None, c), None),
        ([a, b], (c, None), None),
        ([a, b], (), c),
        ([a, b, c], (), a),
        ([a, b, c], (), b),
        ([a, b, c], (None,), None),
    ]
    for _ in range(3):
        for i, (inputs, others, out) in enumerate(roles):
            assert calls.checked(lambda i=i: i, None, inputs, others, out)[0].value == i


@pytest.mark.parametrize("guards", [True, False], ids=["guards", "none"])
def test_the_same_bits_every_time(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setattr(_known, "_guards", None)
    narrow = kernels.layout_of(tensors(), dtype=torch.bfloat16)
    wide = kernels.layout_of(tensors(), alignment=4)
    for _ in range(5):
        for layout in (narrow, wide, None):
            # Of two dtypes, so that one launch of the kernels is not enough.
            given = [*tensors()[:2], *tensors()[2:]]
            if layout is not None:
                given[1] = given[1].double()
            chosen = kernels.layout_of(given) if layout is None else layout
            out = torch.full((chosen.numel,), torch.nan, dtype=chosen.dtype)
            assert kernels.pack(given, layout=layout, out=out) is out
            expected = kernels.pack_reference(given, layout=chosen).to(chosen.dtype)
            assert torch.equal(out, expected)
            targets = [torch.full_like(tensor, torch.nan) for tensor in given]
            kernels.unpack(out, targets, layout=layout)
            for tensor, want in zip(targets, kernels.unpack_reference(out, chosen), strict=True):
                assert torch.equal(tensor, want.to(tensor.dtype))


def test_an_equal_layout_is_another_one() -> None:
    given = tensors()
    for _ in range(4):
        for alignment in (4, 64, 256):
            layout = kernels.layout_of(given, alignment=alignment)
            assert kernels.pack(given, layout=layout).numel() == layout.numel


def test_inference_mode_may_write_what_outside_may_not() -> None:
    layout = kernels.layout_of(tensors())
    with torch.inference_mode():
        inside = tensors()
        for _ in range(4):
            kernels.unpack(torch.zeros(layout.numel), inside, layout=layout)
    with pytest.raises(ValueError, match="inference mode"):
        kernels.unpack(torch.zeros(layout.numel), inside, layout=layout)
    with torch.inference_mode():
        kernels.unpack(torch.zeros(layout.numel), inside, layout=layout)


def test_what_is_remembered_has_a_limit() -> None:
    calls: KnownCalls[int] = KnownCalls(limit=4)
    for numel in range(100):
        for _ in range(3):
            calls.checked(lambda: 0, None, [torch.ones(numel)])
            assert len(calls) <= 4 * _known._ALIKE
    for numel in range(100):
        # Alike but in what follows.
        for _ in range(2):
            calls.checked(lambda: 0, None, [torch.ones(1), torch.ones(numel)])
        assert len(calls) <= 4 * _known._ALIKE
    for numel in range(100):
        # To be told apart by the one in the middle alone.
        for _ in range(2):
            calls.checked(lambda: 0, None, [torch.ones(1), torch.ones(numel), torch.ones(1)])
        assert len(calls) <= 4 * _known._ALIKE
    for _ in range(3):
        # One tensor twice no guard finds.
        twice, _ = calls.checked(lambda: 0, None, [a := torch.ones(7), a])
        assert twice.check is None
    known, memory = _known.Known(None), torch.empty(1001)
    for length in (1, 16, 5000):
        for address in range(1000):
            place = known.found_apart([memory[address:]] * length, length)
            assert known.places[place.in_c.tobytes()] is place
            assert len(known.places) <= max(1, _known._ADDRESSES // length)


def test_no_tensor_is_kept() -> None:
    import gc
    import weakref

    given = tensors()
    gone = [weakref.ref(tensor) for tensor in given]
    for _ in range(4):
        kernels.pack(given)
        kernels.sum_n([given[0], given[0]])
    del given
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
