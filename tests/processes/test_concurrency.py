"""Several threads on one group; several groups at once are in test_subgroups.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collectives
from collectives import CollectiveMismatchError, Group


def in_thread(call: Callable[[], Any], name: str = "another") -> Any:
    """What the call returns in a thread of its own, or raises."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised below
            said.append((False, error))

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60.0)
    (good, result) = said[0]
    if not good:
        raise result
    return result


def total(group: Group, value: float, name: str | None = None) -> float:
    return float(group.all_reduce(torch.tensor([value]), name=name))


def check_unnamed(group: Group) -> None:
    """One thread makes calls without names, until it has ended; nothing is sent for another."""
    n = group.size
    assert total(group, 1.0) == n
    for call in (
        lambda: group.all_reduce(torch.ones(3)),
        lambda: group.all_reduce(torch.ones(3), async_op=True),
        lambda: group.broadcast(torch.ones(3)),
        group.barrier,
        group.join,
    ):
        with pytest.raises(ValueError, match=r"without a name from thread 'another'.*name="):
            in_thread(call)
    assert total(group, 2.0) == 2 * n
    assert in_thread(lambda: total(group, 3.0, "with a name")) == 3 * n
    part = group.split(range(n))
    assert part is not None
    assert in_thread(lambda: total(part, 4.0)) == 4 * n
    # That thread has ended.
    assert in_thread(lambda: total(part, 5.0)) == 5 * n
    assert total(part, 6.0) == 6 * n
    with pytest.raises(ValueError, match="name="):
        in_thread(lambda: total(part, 7.0))


def check_backward(group: Group) -> None:
    """A thread of autograd's calls while the thread that called backward waits."""
    assert total(group, 1.0) == group.size
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: group.all_reduce(gradient.clone()))

    def backward() -> torch.Tensor | None:
        weight.sum().backward()
        return weight.grad

    assert torch.equal(in_thread(backward), torch.full((3,), float(group.size)))


def check_order(group: Group) -> None:
    """Threads that come in another order: with names the same error on every rank, in both calls;
    in the same order the right answers. The group goes on."""
    started = threading.Event()

    def call(name: str, first: bool) -> str:
        if not first:
            started.wait(60.0)
        work: Any = group.all_reduce(torch.ones(3), name=name, async_op=True)
        started.set()
        try:
            return str(work.wait().tolist())
        except CollectiveMismatchError as error:
            return str(error)

    def both(first: str) -> dict[str, str]:
        started.clear()
        answers: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda n=name: answers.update({n: call(n, n == first)}))
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        return answers

    right = str([float(group.size)] * 3)
    assert both("one") == {"one": right, "two": right}
    answers = both("one" if group.rank else "two")
    assert len(answers) == 2
    assert all("all_reduce(one)" in text and "all_reduce(two)" in text for text in answers.values())
    assert both("two") == {"one": right, "two": right}


@pytest.mark.parametrize("check", [check_unnamed, check_backward, check_order])
def test_threads(check: Callable[[Group], None]) -> None:
    collectives.run_threads(3, check)
