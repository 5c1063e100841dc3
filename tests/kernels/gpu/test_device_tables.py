"""What outlives a call in device memory, and when it is given back; torch.cuda is pretended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.call import Call
from kernels.gpu import device_tables
from kernels.gpu.device_tables import DeviceTables, Scratch, upload, write_addresses

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


def made(pinned: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `upload` returns: memory of its own, and the host's part it was given or a new one."""
    return torch.empty(1), torch.empty(1) if pinned is None else pinned


def test_full_device_rests_and_keeps_what_graphs_have_seen(cuda: SimpleNamespace) -> None:
    tables = DeviceTables(limit=1)
    on_other = tables.fetch("table", OTHER, made)
    replayed = tables.fetch("replayed", ONE, made)
    cuda.capturing = True
    assert tables.fetch("replayed", ONE, made) is replayed
    cuda.capturing = False
    dropped = tables.fetch("dropped", ONE, made)
    tables.fetch("third", ONE, made)
    assert cuda.rested == [ONE]
    assert tables.fetch("replayed", ONE, made) is replayed
    assert tables.fetch("table", OTHER, made) is on_other
    assert tables.fetch("dropped", ONE, made) is not dropped


def test_what_is_used_outlives_what_is_not(cuda: SimpleNamespace) -> None:
    tables = DeviceTables(limit=4)
    used = tables.fetch("used", ONE, made)
    for new in range(40):
        tables.fetch(new, ONE, made)
        assert tables.fetch("used", ONE, made) is used
        assert len(tables) <= 4
    # Two at a time are dropped, and the device rests as often.
    assert len(cuda.rested) == 19


def test_tables_of_graphs_are_bounded_by_an_error(cuda: SimpleNamespace) -> None:
    tables = DeviceTables(graph_limit=3)
    known = tables.fetch("known", ONE, made)
    cuda.capturing = True
    assert tables.fetch("known", ONE, made) is known
    tables.fetch("new", ONE, made)
    tables.fetch("other", ONE, made)
    with pytest.raises(RuntimeError, match="make a plan before the capture"):
        tables.fetch("fourth", ONE, made)
    assert tables.fetch("known", ONE, made) is known
    tables.fetch("new", ONE, made)
    cuda.capturing = False
    tables.fetch("fourth", ONE, made)


def test_capturing_the_same_call_again_keeps_nothing_more(cuda: SimpleNamespace) -> None:
    """Each graph fills memory of its own, from a part on the host that all of them read."""
    tables = DeviceTables(graph_limit=2)
    before = tables.fetch("before", ONE, made)
    cuda.capturing = True
    graphs = [tables.fetch("inside", ONE, made) for _ in range(5)]
    assert all(tables.fetch("before", ONE, made) is before for _ in range(5))
    assert len({id(device) for device, _ in graphs}) == 5
    assert len({id(host) for _, host in graphs}) == 1
    assert len(tables) == 2


def test_upload_in_a_capture_reads_the_part_that_another_graph_reads(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    sources: list[torch.Tensor] = []

    def to(source: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        sources.append(source)
        return source.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda.capturing = True
    _, first = upload(np.array([3, 4]), ONE)
    table, again = upload(np.array([3, 4]), ONE, first)
    assert again is first and all(source is first for source in sources)
    assert table.tolist() == [3, 4]


def test_scratch_is_one_for_each_use_and_stream_and_grows() -> None:
    scratch = Scratch(limit=3)
    first = scratch.fetch("dots", CPU, 6, 2, 1)
    assert scratch.fetch("dots", CPU, 3, 1, 1) is first
    others = [scratch.fetch("dots", CPU, 6, 2, 2), scratch.fetch(8, CPU, 6, 2, 1)]
    assert len({each[0].data_ptr() for each in (first, *others)}) == 3
    larger = scratch.fetch("dots", CPU, 3, 5, 1)
    assert len(larger[0]) >= 6 and len(larger[1]) == 5 and not larger[1].any()
    assert scratch.fetch("dots", CPU, 6, 5, 1) is larger
    # A fourth takes the place of all.
    scratch.fetch("dots", CPU, 6, 2, 3)
    assert scratch.fetch("dots", CPU, 6, 5, 1) is not larger


def test_scratch_on_the_default_stream_is_no_graphs(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which cannot be captured: another thread's capture is none of its business."""
    monkeypatch.setattr(device_tables, "_scratch", lambda *_: ([0.0], [0]))
    scratch = Scratch()
    first = scratch.fetch("dots", ONE, 1, 1, 0)
    cuda.capturing = True
    assert scratch.fetch("dots", ONE, 1, 1, 0) is first
    assert scratch.fetch("dots", ONE, 1, 1, 1) is not scratch.fetch("dots", ONE, 1, 1, 1)


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


def test_equal_plans_share_a_table_that_no_other_call_writes() -> None:
    plan = Call("sum_n", [], torch.empty(1), None, planned=True)
    addresses = array("Q", (1 << 41, 1 << 42))
    first = write_addresses(plan, addresses)
    assert write_addresses(plan, addresses) is first
    direct = Call("sum_n", [], torch.empty(1), None)
    assert write_addresses(direct, addresses) is not first
    assert write_addresses(direct, array("Q", (3, 4))).tolist() == [3, 4]
    assert first.tolist() == list(addresses)


def test_a_graphs_addresses_are_kept_and_those_of_direct_calls_are_not(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = DeviceTables()
    monkeypatch.setattr(device_tables, "TABLES", tables)
    monkeypatch.setattr(device_tables, "upload", lambda *_: (torch.empty(1), torch.empty(1)))
    monkeypatch.setattr(torch.Tensor, "to", lambda host, *_, **__: host.clone())
    call: Any = SimpleNamespace(out=SimpleNamespace(device=ONE), planned=False)
    write_addresses(call, array("Q", (1, 2)))
    assert len(tables) == 0
    cuda.capturing = True
    write_addresses(call, array("Q", (1, 2)))
    assert len(tables) == 1
