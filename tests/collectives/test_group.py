"""What a group does with its arguments, on calls that repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from collectives import CollectiveMismatchError, Group, TransportError, run_threads
from collectives.reducers import SumReducer
from collectives.transport import ThreadWorld


@pytest.fixture
def alone() -> Iterator[Group]:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    yield group
    group.close()


class Named(SumReducer):
    """Equal to every other of its kind, whatever it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named)

    def __hash__(self) -> int:
        return 1


def test_operators_of_other_names_are_a_mismatch() -> None:
    def main(group: Group) -> None:
        group.all_reduce(torch.ones(3), Named("one"))
        with pytest.raises(CollectiveMismatchError, match=r"op=one.* op=other"):
            group.all_reduce(torch.ones(3), Named("other" if group.rank else "one"))
        changing = Named("one")
        group.all_reduce(torch.ones(3), changing)
        if group.rank:
            changing.name = "other"
        with pytest.raises(CollectiveMismatchError, match=r"op=one.* op=other"):
            group.all_reduce(torch.ones(3), changing)

    assert run_threads(2, main) == [None, None]


def test_scales_of_zero_keep_their_sign(alone: Group) -> None:
    for zero in (0.0, -0.0, 0.0):
        before, after = torch.ones(3), torch.ones(3)
        alone.all_reduce(before, prescale=zero)
        alone.all_reduce(after, postscale=zero)
        for tensor in (before, after):
            assert torch.equal(tensor.signbit(), torch.tensor(zero).signbit().expand(3))


def test_close_where_one_part_fails_closes_the_rest(
    alone: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = alone.split([0])
    assert part is not None
    closed: list[str] = []

    def fail() -> None:
        raise TransportError("the part's end")

    monkeypatch.setattr(part.transport, "close", fail)
    monkeypatch.setattr(alone.transport, "close", lambda: closed.append("transport"))
    with pytest.raises(TransportError, match="the part's end"):
        alone.close()
    assert (alone.closed, part.closed, closed) == (True, True, ["transport"])
