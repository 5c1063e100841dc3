"""What outlives a call in device memory, and when it is given back; torch.cuda is pretended."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kernels.gpu import launcher

ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    state = SimpleNamespace(capturing=False, rested=[])
    state.is_current_stream_capturing = lambda: state.capturing
    state.synchronize = state.rested.append
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "torch", SimpleNamespace(cuda=state))
        yield state


def test_a_value_is_made_once(cuda):
    cache = launcher.DeviceCache()
    first = cache.fetch("table", ONE, object)
    assert cache.fetch("table", ONE, object) is first
    assert len(cache) == 1 and not cuda.rested


def test_a_full_part_rests_its_own_device_and_keeps_what_graphs_have_seen(cuda):
    cache = launcher.DeviceCache(limit=2)
    on_other = cache.fetch("table", OTHER, object)
    replayed = cache.fetch("replayed", ONE, object)
    cuda.capturing = True
    assert cache.fetch("replayed", ONE, object) is replayed
    cuda.capturing = False
    dropped = cache.fetch("dropped", ONE, object)
    cache.fetch("third", ONE, object)
    assert cuda.rested == [ONE]
    assert cache.fetch("replayed", ONE, object) is replayed
    assert cache.fetch("table", OTHER, object) is on_other
    assert cache.fetch("dropped", ONE, object) is not dropped


def test_scratch_of_a_graph_is_its_own(cuda):
    cache = launcher.DeviceCache()
    outside = cache.fetch("scratch", ONE, object, shared=False)
    cuda.capturing = True
    within = [cache.fetch("scratch", ONE, object, shared=False) for _ in range(2)]
    assert len({id(outside), *map(id, within)}) == 3
    cuda.capturing = False
    assert cache.fetch("scratch", ONE, object, shared=False) is outside
