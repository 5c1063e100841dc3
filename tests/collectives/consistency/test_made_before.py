"""A call like one made before is not checked and described again, and gets no other answer."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from collectives import Average, CollectiveMismatchError, Group, Reducer, Sum, run_threads
from collectives.consistency import description
from collectives.consistency.description import Description
from collectives.cost import LinkRates, Rate
from collectives.execution import operations
from collectives.reducers import SumReducer
from collectives.transport import ThreadWorld

GOOD: dict[str, Any] = {
    "op": Average,
    "algorithm": "rd",
    "name": "a",
    "prescale": 1.0,
    "postscale": 2.0,
    "segments": (0, 2, 6),
}
BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("op", "Average", TypeError, "op must be a Reducer"),
    ("op", [Average], TypeError, "op must be a Reducer"),
    ("algorithm", ["rd"], TypeError, "algorithm: "),
    ("algorithm", "rf", ValueError, "algorithm: .*invalid algorithm 'rf'"),
    ("name", ["a"], TypeError, "name must be a str"),
    ("prescale", True, TypeError, "prescale must be a number"),
    ("prescale", math.nan, ValueError, "prescale must be finite"),
    ("postscale", "2", TypeError, "postscale must be a number"),
    ("postscale", [2.0], TypeError, "postscale must be a number"),
    ("segments", (0, 2.0, 6), TypeError, "segments must be ints"),
    ("segments", (0, 2, 5), ValueError, "segments must start at 0 and end"),
]


@pytest.fixture
def alone() -> Iterator[Group]:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    yield group
    group.close()


def described(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[Description]:
    """What the group's calls are from here on."""
    seen: list[Description] = []
    inner = group._call

    def noted(call: Description, *args: Any, **options: Any) -> Any:
        seen.append(call)
        return inner(call, *args, **options)

    monkeypatch.setattr(group, "_call", noted)
    return seen


@pytest.mark.parametrize(("argument", "value", "error", "text"), BAD)
def test_bad_input_after_good(
    alone: Group, argument: str, value: Any, error: type[Exception], text: str
) -> None:
    for _ in range(2):
        assert torch.equal(alone.all_reduce(torch.ones(6), **GOOD), torch.full((6,), 2.0))
        tensor = torch.ones(6)
        with pytest.raises(error, match=text):
            alone.all_reduce(tensor, **{**GOOD, argument: value})
        assert torch.equal(tensor, torch.ones(6))


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (torch.ones(12)[::2], ValueError, "contiguous"),
        (torch.ones(6, dtype=torch.int64), TypeError, "Average has no meaning on torch.int64"),
        (torch.ones(6).to_sparse(), ValueError, "dense"),
        (torch.ones(6, device="meta"), ValueError, "on meta"),
        (torch.ones(6, dtype=torch.complex64).conj(), ValueError, "conj"),
    ],
)
def test_bad_tensors_after_good(
    alone: Group, tensor: torch.Tensor, error: type[Exception], text: str
) -> None:
    for _ in range(2):
        alone.all_reduce(torch.ones(6), Average)
        with pytest.raises(error, match=text):
            alone.all_reduce(tensor, Average)


def test_calls_alike_are_described_once(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = described(alone, monkeypatch)
    for _ in range(3):
        alone.all_reduce(torch.ones(6), **GOOD)
    assert seen[0] is seen[1] is seen[2]


@pytest.mark.parametrize(
    "other",
    [
        {"op": Sum},
        {"algorithm": "xring"},
        {"algorithm": None},
        {"name": ""},
        {"name": None},
        {"prescale": 2.0},
        {"postscale": 1.0},
        {"segments": None},
        {"segments": (0, 3, 6)},
    ],
)
def test_every_argument_counts(
    alone: Group, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = described(alone, monkeypatch)
    alone.all_reduce(torch.ones(6), **GOOD)
    alone.all_reduce(torch.ones(6), **{**GOOD, **other})
    alone.all_reduce(torch.ones(2, 3), **GOOD)
    alone.all_reduce(torch.ones(6, dtype=torch.float64), **GOOD)
    assert len({call.to_json() for call in seen}) == len({call.key for call in seen}) == 4


def test_what_is_remembered_is_bounded(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_MOST", 3)
    for number in range(10):
        alone.all_reduce(torch.ones(6), name=str(number))
        assert len(alone._made._calls) <= 3


class _Alike(SumReducer):
    """Equal to every other of its kind, whatever it is called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike)

    def __hash__(self) -> int:
        return 1


def test_an_operator_is_known_by_its_name_too() -> None:
    def main(group: Group) -> None:
        group.all_reduce(torch.ones(3), _Alike("one"))
        with pytest.raises(CollectiveMismatchError, match=r"op=one.* op=other"):
            group.all_reduce(torch.ones(3), _Alike("other" if group.rank else "one"))
        changing = _Alike("one")
        group.all_reduce(torch.ones(3), changing)
        if group.rank:
            changing.name = "other"
        with pytest.raises(CollectiveMismatchError, match=r"op=one.* op=other"):
            group.all_reduce(torch.ones(3), changing)

    assert run_threads(2, main) == [None, None]


def test_an_operator_without_a_hash(alone: Group) -> None:
    class Unhashable(SumReducer):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return self is other

    operator: Reducer = Unhashable()
    for _ in range(3):
        assert torch.equal(alone.all_reduce(torch.ones(6), operator), torch.ones(6))


def test_the_way_follows_what_auto_may_choose_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that `auto` takes as messages by size alone, and shows once links are measured."""
    asked: list[bool] = []
    way_of = operations.way_of

    def noted(spec: Any, show: Any, size: int, op: Reducer, measured: bool) -> str | None:
        asked.append(measured)
        return way_of(spec, show, size, op, measured)

    monkeypatch.setattr(operations, "way_of", noted)
    rate = Rate(1e-6, 1e-9)

    def main(group: Group) -> list[float]:
        sums = []
        for rates in (None, LinkRates(rate, rate, rate, rate), None):
            group.set_link_rates(rates)
            for _ in range(2):
                tensor = torch.full((2_000_000,), 1.0)
                sums.append(group.all_reduce(tensor)[-1].item())
        return sums

    assert run_threads(2, main) == [[2.0] * 6] * 2
    assert sorted(asked) == [False, False, True, True]


@dataclass
class _Unhashable(SumReducer):
    """With an equality of its own, and so without a hash."""

    name: str = "Unhashable"


@pytest.mark.parametrize("algorithm", ["auto", "xring"])
@pytest.mark.parametrize("size", [2, 3])
def test_an_operator_without_a_hash_among_several_ranks(size: int, algorithm: str) -> None:
    def main(group: Group) -> list[float]:
        one = torch.ones(6)
        several = [torch.ones(3), torch.ones(2)]
        for _ in range(2):
            group.all_reduce(one, _Unhashable(), algorithm=algorithm)
            group.grouped_all_reduce(several, _Unhashable(), algorithm=algorithm)
        return [one[-1].item(), several[-1][-1].item()]

    assert run_threads(size, main) == [[float(size) ** 2] * 2] * size


def test_an_operator_is_not_kept() -> None:
    class Large(SumReducer):
        """May hold a table."""

    def main(group: Group) -> bool:
        op = Large()
        for _ in range(2):
            group.all_reduce(torch.ones(6), op)
            group.all_reduce(torch.ones(6), op, algorithm="xring")
        kept = weakref.ref(op)
        del op
        gc.collect()
        return kept() is not None

    assert run_threads(2, main) == [False] * 2


def test_a_zero_has_a_sign(alone: Group) -> None:
    for zero in (0.0, -0.0, 0.0):
        before, after = torch.ones(3), torch.ones(3)
        alone.all_reduce(before, prescale=zero)
        alone.all_reduce(after, postscale=zero)
        for tensor in (before, after):
            assert torch.equal(tensor.signbit(), torch.tensor(zero).signbit().expand(3))
