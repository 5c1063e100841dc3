"""Operands that stay where they are, of which all is known, beside an output or a flag that moves.

Everything that decides whether memory overlaps must count each time: nothing here is new but the
one thing that makes the call wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _known, packing

TIMES = 4
Pair = Callable[..., Tensor]


@pytest.fixture
def memory() -> Tensor:
    return torch.zeros(256)


@pytest.fixture
def operands(memory: Tensor) -> list[Tensor]:
    """Two of 32 elements, with room before, between and after."""
    return [memory[48:80], memory[160:192]]


def listed() -> list[Tensor]:
    return [torch.randn(shape) for shape in ((8, 4), (8,), (), (3, 5))]


def refused(text: str) -> pytest.RaisesExc[ValueError]:
    return pytest.raises(ValueError, match=text)


def flags() -> Iterator[Tensor | None]:
    flag = torch.zeros(1)
    for _ in range(TIMES):
        yield None
        yield flag


def test_sum_n(memory: Tensor, operands: list[Tensor]) -> None:
    for flag in flags():
        kernels.sum_n(operands, out=memory[:32], found_inf=flag)
    for _ in range(2):
        with refused(r"out overlaps tensors\[0\]"):
            kernels.sum_n(operands, out=memory.view(torch.float64)[:32])
        with refused(r"out overlaps tensors\[0\]"):
            kernels.sum_n(operands, out=memory[40:72])
        with refused("found_inf overlaps out"):
            kernels.sum_n(operands, out=memory[:32], found_inf=memory[3:4])
        with refused(r"found_inf overlaps tensors\[0\]"):
            kernels.sum_n(operands, out=memory[:32], found_inf=memory[50:51])


def combine(a: Tensor, b: Tensor, **options: Tensor | None) -> Tensor:
    return kernels.combine(a, b, torch.ones(1, 3, dtype=torch.float64), **options)


@pytest.mark.parametrize("function", [kernels.scaled_add, kernels.adasum, combine])
def test_pairs(function: Pair, memory: Tensor, operands: list[Tensor]) -> None:
    a, b = operands
    for flag in flags():
        function(a, b, out=memory[:32], found_inf=flag)
    for _ in range(2):
        with refused("out overlaps a"):
            function(a, b, out=memory[40:72])
        with refused("out overlaps b"):
            function(a, memory[8:40], out=memory[:32])
        with refused("out overlaps a"):
            function(memory[8:40], b, out=memory[:32])
        with refused("found_inf overlaps out"):
            function(a, b, out=memory[:32], found_inf=memory[3:4])


def test_pack_and_unpack(memory: Tensor, operands: list[Tensor]) -> None:
    layout = kernels.layout_of(operands)
    buffer = memory[80:144]
    for flag in flags():
        kernels.pack(operands, layout=layout, out=buffer, found_inf=flag)
        kernels.unpack(buffer, operands, layout=layout, found_inf=flag)
    for _ in range(2):
        with refused("out overlaps tensors"):
            kernels.pack(operands, layout=layout, out=memory[:64])
        with refused("buffer overlaps tensors"):
            kernels.unpack(memory[:64], operands, layout=layout)
        with refused("found_inf overlaps out"):
            kernels.pack(operands, layout=layout, out=buffer, found_inf=memory[81:82])
        with refused("found_inf overlaps tensors"):
            kernels.unpack(buffer, operands, layout=layout, found_inf=memory[49:50])


def test_functions_do_not_answer_for_each_other() -> None:
    a, b, out = (torch.zeros(32) for _ in range(3))
    half = torch.zeros(32, dtype=torch.float16)
    for _ in range(TIMES):
        kernels.scaled_add(a, b, out=out)
        kernels.scaled_add(a, half)
        kernels.scaled_add(a, half, out=out)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"out has dtype .* drop one"):
            kernels.scaled_add(a, b, out=out, dtype=torch.float64)
        with pytest.raises(TypeError, match="b has dtype"):
            kernels.adasum(a, half)
        with pytest.raises(TypeError, match="b has dtype"):
            kernels.adasum(a, half, out=out)


def test_one_list_goes_into_buffers_of_any_dtype() -> None:
    given = [torch.zeros(64)]
    for _ in range(TIMES):
        for dtype in (torch.float32, torch.float64, torch.float16):
            kernels.unpack(torch.ones(64, dtype=dtype), given)
            assert (given[0] == 1).all()
            given[0].zero_()


def test_what_was_written_inside_inference_mode_says_nothing_of_outside() -> None:
    """There, what was made outside looks to guards as what was made inside does out here."""
    outside = [torch.zeros(8, 4) for _ in range(2)]
    layout = kernels.layout_of(outside)
    buffer = torch.ones(layout.numel)
    with torch.inference_mode():
        inside = [torch.zeros(8, 4) for _ in range(2)]
        for _ in range(TIMES):
            kernels.unpack(buffer, outside, layout=layout)
            kernels.scaled_add(*outside, out=outside[0])
            kernels.adasum(*outside, out=outside[1])
            kernels.sum_n(outside, out=outside[1])
    for _ in range(2):
        with refused(r"tensors\[0\] was made in inference mode"):
            kernels.unpack(buffer, inside, layout=layout)
        with refused("out was made in inference mode"):
            kernels.scaled_add(*inside, out=inside[0])
        with refused("out was made in inference mode"):
            kernels.adasum(*inside, out=inside[1])
        with refused("out was made in inference mode"):
            kernels.sum_n(inside, out=inside[1])
    assert all((tensor == 0).all() for tensor in inside)


@pytest.mark.parametrize(
    ("mode", "rows"), [(nullcontext, 7), (torch._C._AutoDispatchBelowAutograd, 8)]
)
def test_what_was_written_says_nothing_of_inference_tensors(
    mode: Callable[[], AbstractContextManager[None]], rows: int
) -> None:
    """Below autograd, where custom operators run, every tensor looks like one of these."""
    given, buffer = [torch.zeros(rows, 6)], torch.ones(48)
    with torch.inference_mode():
        inside = [torch.zeros(rows, 6)]
    with mode():
        for _ in range(TIMES):
            kernels.unpack(buffer, given)
        for _ in range(TIMES):
            with refused(r"tensors\[0\] was made in inference mode"):
                kernels.unpack(buffer, inside)
    assert (given[0] == 1).all() and (inside[0] == 0).all()


def test_where_it_is_imported_says_nothing_of_inference_tensors() -> None:
    if _known._guards is None:
        pytest.skip("this torch has no guards for lists of tensors")
    code = """if True:
        import torch
        with torch.inference_mode():
            import kernels
            from kernels import _known
            assert not _known._tells_inference()
        assert _known._tells_inference()"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def _another_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    # A list has been kept while it was still the one before.
    for _ in range(TIMES):
        kernels.unpack(torch.zeros(64), [torch.zeros(9, 6)])
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_another_default")
def test_the_default_dtype_says_nothing_of_inference_tensors() -> None:
    test_what_was_written_says_nothing_of_inference_tensors(
        torch._C._AutoDispatchBelowAutograd, rows=8
    )


def test_known_lists_are_not_asked_again_who_may_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, buffer = [torch.zeros(7, 5)], torch.ones(48)
    for _ in range(TIMES):
        kernels.unpack(buffer, given)
    if _known._guards is None:
        pytest.skip("this torch has no guards for lists of tensors")

    def refuse(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(packing, "check_all_writable", refuse)
    kernels.unpack(buffer, given)


@pytest.mark.parametrize("known", [1, 4])
def test_addresses_are_looked_at_every_time(known: int) -> None:
    layout = kernels.layout_of(listed())
    memory = torch.zeros(layout.numel + 8)
    out, found_inf = memory[: layout.numel], torch.zeros(1)
    for _ in range(known):
        kernels.pack(listed(), layout=layout, out=torch.empty(layout.numel))
        kernels.unpack(torch.zeros(layout.numel), listed(), layout=layout)
        kernels.unpack(out, listed(), layout=layout, found_inf=found_inf)
    within = [out[:32].view(8, 4), *listed()[1:]]
    shared = torch.zeros(40)
    twice = [shared[:32].view(8, 4), shared[31:39], *listed()[2:]]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out overlaps tensors\[0\]"):
            kernels.pack(within, layout=layout, out=out)
        with pytest.raises(ValueError, match=r"buffer overlaps tensors\[0\]"):
            kernels.unpack(out, within, layout=layout)
        with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap"):
            kernels.unpack(out, twice, layout=layout)
        with pytest.raises(ValueError, match="found_inf overlaps buffer"):
            kernels.unpack(out, listed(), layout=layout, found_inf=out[3:4])
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
