"""Lists that passed the checks before: recognised, and nothing else taken for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _known, _packed, reduction
from kernels._known import KnownLists

SHAPES = [(8, 4), (8,), (), (3, 5)]


def tensors(*, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "LISTS", KnownLists())
    monkeypatch.setattr(reduction, "_LISTS", KnownLists())


def calls(layout: kernels.Layout | None) -> dict[str, Callable[[Any], Any]]:
    made = kernels.layout_of(tensors())

    def unpack(given: Any) -> None:
        kernels.unpack(torch.randn(made.numel), given, layout=layout)

    return {
        "pack": lambda given: kernels.pack(given, layout=layout),
        "unpack": unpack,
        "sum_n": kernels.sum_n,
    }


FUNCTIONS = ["pack", "unpack", "sum_n"]
REFUSED = ("None", "complex", "strided", "negative", "sparse", "meta", "nested")


def good(function: str) -> list[Tensor]:
    return tensors() if function in ("pack", "unpack") else [torch.randn(8, 4) for _ in SHAPES]


@pytest.mark.skipif(_known._guards is None, reason="this torch has no TensorGuards")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("given", [True, False], ids=["layout", "no layout"])
def test_the_third_call_reads_no_attributes(
    function: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = calls(kernels.layout_of(tensors()) if given else None)[function]
    call(good(function))
    call(good(function))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("checked anew")

    for module in (_packed, reduction):
        monkeypatch.setattr(module, "check_list", fail)
    monkeypatch.setattr(_packed, "layout_of", fail)
    call(good(function))
    call(tuple(good(function)))
    with pytest.raises(AssertionError, match="checked anew"):
        call(good(function)[:-1])


def sparse() -> Tensor:
    return torch.ones(8, 4).to_sparse()


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(8, 4)


def retyped() -> Tensor:
    tensor = torch.ones(8, 4)
    tensor.data = tensor.data.to(torch.int32)
    return tensor


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])


class Shapeless(Tensor):
    """No list of these is kept, and what it says of its shape is not asked."""

    @property
    def shape(self) -> Any:
        return [8, 4]


def transposed() -> Tensor:
    return torch.ones(4, 8).t_()


BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "array": lambda: torch.ones(8, 4).numpy(),
    "dtype": lambda: torch.ones(8, 4, dtype=torch.int32),
    "complex": lambda: torch.ones(8, 4, dtype=torch.complex64),
    "retyped in place": retyped,
    "shape": lambda: torch.ones(4, 8),
    "more dimensions": lambda: torch.ones(8, 4, 1),
    "strided": lambda: torch.ones(8, 8)[:, ::2],
    "transposed": lambda: torch.ones(4, 8).t(),
    "transposed in place": transposed,
    "expanded": lambda: torch.ones(8, 1).expand(8, 4),
    "negative": lambda: torch._neg_view(torch.ones(8, 4)),
    "sparse": sparse,
    # A guard that is asked about one ends the process.
    "nested": nested,
    "uninitialised": torch.nn.parameter.UninitializedParameter,
    "subclass": lambda: torch.ones(8, 4).as_subclass(Shapeless),
    "meta": lambda: torch.ones(8, 4, device="meta"),
    "other float": lambda: torch.ones(8, 4, dtype=torch.float16),
    "inference": inference,
    "parameter": lambda: torch.nn.Parameter(torch.ones(8, 4)),
    "needs grad": lambda: torch.ones(8, 4, requires_grad=True),
}


def outcome(call: Callable[[Any], Any], given: Any) -> tuple[type, str] | None:
    try:
        call(given)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("with_layout", [True, False], ids=["layout", "no layout"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", BAD)
def test_what_differs_is_answered_as_if_it_came_first(
    function: str, bad: str, with_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = kernels.layout_of(tensors()) if with_layout else None
    call = calls(layout)[function]
    for place in (0, 2):
        # Of sum_n's tensors all have the shape of the first.
        given: list[Any] = good(function)
        given[place] = BAD[bad]()
        with monkeypatch.context() as context:
            context.setattr(_known, "_guards", None)
            expected = outcome(call, given)
        for _ in range(4):
            call(good(function))
        assert outcome(call, given) == expected
        assert outcome(call, given) == expected
        call(good(function))
        if bad in REFUSED and place == 0:
            assert expected is not None


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


@pytest.mark.parametrize("known", [1, 4])
def test_addresses_are_looked_at_every_time(known: int) -> None:
    layout = kernels.layout_of(tensors())
    memory = torch.zeros(layout.numel + 8)
    out, found_inf = memory[: layout.numel], torch.zeros(1)
    for _ in range(known):
        kernels.pack(tensors(), layout=layout, out=torch.empty(layout.numel))
        kernels.unpack(torch.zeros(layout.numel), tensors(), layout=layout)
        kernels.unpack(out, tensors(), layout=layout, found_inf=found_inf)
    within = [out[:32].view(8, 4), *tensors()[1:]]
    shared = torch.zeros(40)
    twice = [shared[:32].view(8, 4), shared[31:39], *tensors()[2:]]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
            kernels.pack(within, layout=layout, out=out)
        with pytest.raises(ValueError, match=r"buffer overlaps tensors\[0\]"):
            kernels.unpack(out, within, layout=layout)
        with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
            kernels.unpack(out, twice, layout=layout)
        with pytest.raises(ValueError, match="found_inf overlaps buffer"):
            kernels.unpack(out, tensors(), layout=layout, found_inf=out[3:4])
        # Reading twice is no fault.
        kernels.pack(twice, layout=layout, out=out)


@pytest.mark.parametrize("known", [1, 4])
def test_sum_n_looks_at_addresses_every_time(known: int) -> None:
    memory = torch.zeros(64)
    for _ in range(known):
        kernels.sum_n([memory[:32], torch.ones(32)], out=memory[:32])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
            kernels.sum_n([memory[:32], torch.ones(32)], out=memory[1:33])
        with pytest.raises(ValueError, match=r"found_inf overlaps"):
            kernels.sum_n([memory[:32], torch.ones(32)], found_inf=memory[2:3])
        # The output's dtype decides how far it reaches.
        with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
            kernels.sum_n([memory[:32], torch.ones(32)], out=memory.view(torch.float64)[:32])


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
    lists: KnownLists[int] = KnownLists(limit=4)
    for numel in range(100):
        for _ in range(3):
            lists.keep(None, [torch.ones(numel)], numel)
            assert len(lists) <= 4 * _known._ALIKE
    for numel in range(100):
        # Alike but in what follows.
        for _ in range(2):
            lists.keep(None, [torch.ones(1), torch.ones(numel)], numel)
        assert len(lists) <= 4 * _known._ALIKE
    for numel in range(100):
        # To be told apart by the one in the middle alone.
        for _ in range(2):
            lists.keep(None, [torch.ones(1), torch.ones(numel), torch.ones(1)], numel)
        assert len(lists) <= 4 * _known._ALIKE
    known = _known.Known(None)
    for length in (1, 16, 5000):
        for address in range(2000):
            known.found_apart((address,), length)
            assert (address,) in known.apart
            assert len(known.apart) <= max(1, _known._ADDRESSES // length)


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
