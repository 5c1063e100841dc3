"""The default group's life in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import collectives


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    collectives.shutdown()


def test_init_after_close_opens_a_new_group() -> None:
    closed = collectives.init()
    closed.close()
    assert not collectives.is_initialized()
    with pytest.raises(RuntimeError, match="call init"):
        collectives.default_group()
    opened = collectives.init()
    assert opened is not closed and collectives.init() is opened
    assert collectives.default_group() is opened
    assert torch.equal(collectives.default_group().all_reduce(torch.ones(3)), torch.ones(3))
