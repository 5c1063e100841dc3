"""The default group's life in one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import adasum
import collectives
from collectives import Group, TransportError
from collectives.bootstrap.transport_selection import connect
from collectives.call import Call


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
    with pytest.raises(RuntimeError, match=r"call adasum.init\(\) or collectives.init\(\)"):
        collectives.default_group()
    opened = collectives.init()
    assert opened is not closed and collectives.init() is opened
    assert collectives.default_group() is opened
    assert torch.equal(collectives.default_group().all_reduce(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_nccl_that_is_missing_is_an_error_of_one_rank_too(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would else be found out where the program first runs on several."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ADASUM_TRANSPORT", "nccl" if by == "environment" else "auto")
    with pytest.raises(TransportError, match='"nccl": rank 0: NCCL needs a GPU that torch sees'):
        collectives.init(transport="nccl" if by == "argument" else None)
    assert not collectives.is_initialized()


def test_nccl_that_is_missing_is_an_error_of_a_process_group_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gloo: Any = SimpleNamespace(size=1, process_group=None)
    with pytest.raises(TransportError, match='"nccl": rank 0: NCCL needs a GPU'):
        connect(gloo, 1.0, Call("init", options={"transport": "nccl"}))
    assert connect(gloo, 1.0, Call("init", options={"transport": "auto"})) is gloo


def test_second_init_with_the_same_or_no_arguments_returns_the_group() -> None:
    group = collectives.init(timeout=20.0, transport="auto")
    assert collectives.init(timeout=20, transport="auto") is group
    assert collectives.init() is group
    adasum.init()
    adasum.init(timeout=20.0)


@pytest.mark.parametrize(
    ("name", "value", "first"),
    [("timeout", 21.0, "20.0"), ("transport", "gloo", "'auto'")],
)
@pytest.mark.parametrize("init", [collectives.init, adasum.init])
def test_second_init_with_another_argument_raises_and_names_it(
    init: Any, name: str, value: Any, first: str
) -> None:
    group = collectives.init(timeout=20.0)
    with pytest.raises(ValueError, match=f"^{name} is {value!r} in a second .* was {first} in"):
        init(**{name: value})
    assert collectives.default_group() is group and not group.closed
    collectives.shutdown()
    assert init(**{name: value}) is not group


def test_second_init_with_a_process_group_that_is_none_raises() -> None:
    collectives.init()
    with pytest.raises(TypeError, match="process_group must be a torch"):
        collectives.init(process_group=3)  # type: ignore[arg-type]


def test_init_under_thread_ranks_takes_any_arguments() -> None:
    def job(group: Group) -> bool:
        return collectives.init(timeout=3.0, transport="gloo") is group

    assert collectives.run_threads(2, job) == [True, True]
