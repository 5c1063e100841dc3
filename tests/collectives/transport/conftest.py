from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.fake_nccl import FakeNccl
from tests.fakes.fake_torch import FakeTorch, make_fake
from tests.fakes.nccl_machine import Machine, make_machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield from make_machine(monkeypatch, FakeNccl())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    yield from make_fake(monkeypatch)
