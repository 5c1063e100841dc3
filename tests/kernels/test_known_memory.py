"""What is used is what was checked; and what C is to read is there until it has read it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import _known
from kernels.cpu import native


class Changing(Sequence[Tensor]):
    """Holds other tensors each time that it is read, equal in all but what they hold."""

    def __init__(self, first: list[Tensor]) -> None:
        self.first, self.readings = first, 0

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: Any) -> Any:
        self.readings += index == 0
        tensor = self.first[index]
        return tensor if self.readings == 1 else torch.full_like(tensor, torch.nan)


@pytest.mark.parametrize("with_layout", [True, False], ids=["layout", "no layout"])
def test_a_list_is_read_once(with_layout: bool) -> None:
    first = [torch.randn(3, 5), torch.randn(3, 5)]
    made = kernels.layout_of(first)
    layout = made if with_layout else None
    assert torch.equal(kernels.sum_n(Changing(first)), first[0] + first[1])
    packed = kernels.pack(Changing(first), layout=layout)
    assert torch.equal(packed, kernels.pack(first, layout=made))
    into = [torch.zeros_like(tensor) for tensor in first]
    written = kernels.unpack(packed, Changing(into), layout=layout)
    assert all(map(torch.equal, into, first))
    assert all(one is other for one, other in zip(written, into, strict=True))


def test_arrays_that_c_reads_are_kept_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library(torch.float32)
    if library is None:
        pytest.skip(f"no compiled CPU path: {native.why_not()}")
    copy, seen = library._copy, []

    def late(task: bytes) -> None:
        [(listed, *gone)] = kept
        # As a thread does that began to compute them before the other had.
        del listed.__dict__["in_c"]
        seen.append([array() is not None for array in gone])
        copy(task)

    kept: list[tuple[Any, ...]] = []
    copied = native.Library.copy

    def watched(self: Any, pointers: Any, listed: Any, *rest: Any, **options: Any) -> None:
        kept[:] = [(listed, *map(weakref.ref, listed.in_c))]
        copied(self, pointers, listed, *rest, **options)

    monkeypatch.setattr(native.Library, "copy", watched)
    monkeypatch.setattr(library, "_copy", late)
    given = [torch.randn(3, 5), torch.randn(7)]
    buffer = kernels.pack(given)
    assert torch.equal(buffer[:15], given[0].view(-1)) and torch.equal(buffer[16:23], given[1])
    assert seen == [[True, True]]


def test_a_view_into_no_memory_is_not_read_there() -> None:
    """It lies at a low address, not at 0: what reads there ends the process."""
    zeros, ones = torch._efficientzerotensor((8,))[2:6], torch.ones(4)
    assert zeros.data_ptr() == 8
    assert _known.in_memory([ones, ones[4:], ones[2:]], (ones.data_ptr(), 0, ones[2:].data_ptr()))
    assert not _known.in_memory([ones, zeros], (ones.data_ptr(), zeros.data_ptr()))
    for _ in range(3):
        assert torch.equal(kernels.sum_n([zeros, ones]), ones)
        assert torch.equal(kernels.scaled_add(ones, zeros), ones)
        assert torch.equal(kernels.adasum(zeros, ones, (0, 2, 4)), ones)
        assert kernels.dot_and_norms(zeros, ones).tolist() == [[0.0, 0.0, 4.0]]
        assert not kernels.pack([zeros]).any()

    def within(whole: Tensor) -> Tensor:
        half = whole[4:]
        return kernels.sum_n([half, half])

    for _ in range(3):
        found = torch.func.functionalize(within)(torch.ones(8))
        assert found.tolist() == [2.0] * 4
