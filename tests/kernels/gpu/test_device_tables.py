"""What outlives a call in device memory, and when it is given back; torch.cuda is pretended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import device_tables
from kernels.gpu.device_tables import AddressTable, DeviceTables, Scratch

ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(capturing=False, rested=[])
    state.is_current_stream_capturing = lambda: state.capturing
    state.synchronize = state.rested.append
    with monkeypatch.context() as patch:
        patch.setattr(device_tables.torch, "cuda", state)
        yield state


def test_table_of_equal_content_is_made_once(cuda: SimpleNamespace) -> None:
    tables = DeviceTables()
    first = tables.fetch("table", ONE, object)
    assert tables.fetch("table", ONE, object) is first
    assert len(tables) == 1 and not cuda.rested


def test_full_device_rests_and_keeps_what_graphs_have_seen(cuda: SimpleNamespace) -> None:
    tables = DeviceTables(limit=1)
    on_other = tables.fetch("table", OTHER, object)
    replayed = tables.fetch("replayed", ONE, object)
    cuda.capturing = True
    assert tables.fetch("replayed", ONE, object) is replayed
    cuda.capturing = False
    dropped = tables.fetch("dropped", ONE, object)
    tables.fetch("third", ONE, object)
    assert cuda.rested == [ONE]
    assert tables.fetch("replayed", ONE, object) is replayed
    assert tables.fetch("table", OTHER, object) is on_other
    assert tables.fetch("dropped", ONE, object) is not dropped


def test_tables_of_graphs_are_bounded_by_an_error(cuda: SimpleNamespace) -> None:
    tables = DeviceTables(graph_limit=3)
    known = tables.fetch("known", ONE, object)
    cuda.capturing = True
    assert tables.fetch("known", ONE, object) is known
    # Made in a graph, which uploads it at each replay: none is found again.
    assert tables.fetch("new", ONE, object) is not tables.fetch("new", ONE, object)
    with pytest.raises(RuntimeError, match="make a plan before the capture"):
        tables.fetch("fourth", ONE, object)
    assert tables.fetch("known", ONE, object) is known
    cuda.capturing = False
    tables.fetch("fourth", ONE, object)


def test_scratch_is_one_for_each_use_and_stream_and_grows() -> None:
    scratch = Scratch(limit=3)
    first = scratch.fetch("dots", CPU, 1, 6, 2)
    assert scratch.fetch("dots", CPU, 1, 3, 1) is first
    others = [scratch.fetch("dots", CPU, 2, 6, 2), scratch.fetch(8, CPU, 1, 6, 2)]
    assert len({each[0].data_ptr() for each in (first, *others)}) == 3
    larger = scratch.fetch("dots", CPU, 1, 3, 5)
    assert len(larger[0]) >= 6 and len(larger[1]) == 5 and not larger[1].any()
    assert scratch.fetch("dots", CPU, 1, 6, 5) is larger
    # A fourth takes the place of all.
    scratch.fetch("dots", CPU, 3, 6, 2)
    assert scratch.fetch("dots", CPU, 1, 6, 5) is not larger


def test_scratch_of_a_graph_is_its_own(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []

    def make(*arguments: object) -> tuple[object, ...]:
        made.append(arguments)
        return [torch.empty(6)], [torch.empty(2)]

    monkeypatch.setattr(device_tables, "_scratch", make)
    scratch = Scratch()
    outside = scratch.fetch("dots", ONE, 1, 1, 1)
    cuda.capturing = True
    within = [scratch.fetch("dots", ONE, 1, 1, 1) for _ in range(2)]
    assert len({id(outside), *map(id, within)}) == 3
    cuda.capturing = False
    assert scratch.fetch("dots", ONE, 1, 1, 1) is outside
    assert len(made) == 3


def test_address_table_of_a_plan_changes_no_other() -> None:
    mine, others = AddressTable(), AddressTable()
    addresses = array("Q", (1 << 41, 1 << 42))
    first = mine.write(addresses, CPU)
    assert others.write(addresses, CPU) is first
    assert mine.write(array("Q", (3, 4)), CPU).tolist() == [3, 4]
    assert others.write(array("Q", (5, 6)), CPU).tolist() == [5, 6]
    assert first.tolist() == list(addresses)
