"""Every collective of `collectives` on two ranks that are threads, on awkward arguments.

Both ranks make the same call: they answer alike, or both reject with nothing changed and go on. Or
they make two calls: then what a rank gets is an answer, its own rejection, or a collective error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import collectives
from collectives import (
    Average,
    CollectiveError,
    CollectiveMismatchError,
    Group,
    Max,
    Min,
    Product,
    Sum,
)
from collectives.schedules import copying, halving
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.schedule import IDLE
from tests.collectives.operators import TrimmedMean
from tests.fuzz.outcome import REJECTIONS, SETTINGS, Recipe, attempt
from tests.fuzz.values import (
    ODD_VALUES,
    Arg,
    Look,
    constant,
    looks,
    segments,
    sometimes,
    tensor,
    tensors,
    value,
)

Strategy = st.SearchStrategy[Arg]
SPECS = (None, "auto", *SCHEDULES, "psgpu#2", "rd:2:xring", "nccl")

# An all-reduce of two ranks, one of three, one that is none, and one that is wrong.
SCHEDULES_OF_TWO = (
    halving.doubling(2),
    halving.doubling(3),
    copying.broadcast(2, 0),
    replace(halving.doubling(2), steps=lambda rank: [IDLE]),
)


@functools.lru_cache(maxsize=256)
def _signatures(look: Look) -> dict[str, tuple[list[Strategy], dict[str, Strategy]]]:
    """What each takes: positional arguments, and keywords that may be left out."""
    a, many = tensor(look), tensors(look)
    op = value(Sum, Average, Max, Min, Product, TrimmedMean(shared=True))
    name = value(None, "gradient", "")
    scales = {"prescale": value(1.0, 2, 0.5), "postscale": value(1.0, -1.0)}
    algorithm = value(*SPECS)
    named = {"name": name}
    waits = {"async_op": st.sampled_from((constant(False), constant(True), constant(1)))}
    ranks = value(0, 1)
    owners = value(None, [0], [1, 0], [0, 1, 1], [2, 0], [True], "01")
    counts = sometimes(
        st.sampled_from([constant(each) for each in ODD_VALUES]),
        st.lists(st.integers(-1, 4), min_size=1, max_size=3).map(constant)
        | value(None, torch.tensor([1, 1]), torch.tensor([1.0, 1.0])),
        4,
    )
    return {
        "all_gather": ([a], {"out": sometimes(a, value(None), 3), **named, **waits}),
        "all_reduce": (
            [a],
            {
                "op": op,
                "algorithm": algorithm,
                "segments": segments(look),
                **scales,
                **named,
                **waits,
            },
        ),
        "all_to_all": ([a], {"splits": counts, **named, **waits}),
        "barrier": ([], named),
        "broadcast": ([a], {"root": ranks, **named, **waits}),
        "broadcast_from_owners": ([many], {"owners": owners, **named, **waits}),
        "grouped_all_reduce": (
            [many],
            {
                "op": op,
                "algorithm": algorithm,
                "names": value((), ["w"], "w", [7]),
                "packed": value(False, True),
                **scales,
                **named,
                **waits,
            },
        ),
        "owners": ([value([3, 4], [2**40], [-1], [True])], {}),
        "reduce": ([a], {"dst": ranks, "op": op, **named, **waits}),
        "reduce_scatter": (
            [a],
            {
                "op": op,
                "by_rows": value(False, True),
                "out": sometimes(a, value(None), 3),
                **scales,
                **named,
                **waits,
            },
        ),
        "reduce_to_owners": ([many], {"op": op, "owners": owners, **scales, **named, **waits}),
        "run": (
            [value(*SCHEDULES_OF_TWO), a],
            {"op": op, "segments": segments(look), **scales, **named, **waits},
        ),
        "split": ([value([0], [1, 0], (0, 1), [2], [0, 0], [])], {}),
    }


class DefaultGroup:
    """The methods of the default group, which is another one in each thread and each example."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(collectives.default_group(), name)(*args, **kwargs)

        return call


NAMES = sorted(_signatures(Look((6,), torch.float32)))
# Gathers and scatters may write to an `out`.
READ_ONLY = {"all_to_all", "owners"}


@st.composite
def recipes(draw: Any, module: Any, signatures: Any, name: str) -> Recipe:
    """A call of `module.name`, waited for."""
    positional, keywords = signatures(draw(looks))[name]
    args = tuple(draw(strategy) for strategy in positional)
    given_names = [key for key in keywords if draw(st.booleans())]
    return Recipe(
        _waited(getattr(module, name)), args, {key: draw(keywords[key]) for key in given_names}
    )


def _waited(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        return answer.wait() if hasattr(answer, "wait") else answer

    return call


def alike(recipe: Recipe, rejections: Sequence[type[BaseException]], read_only: bool) -> None:
    """Two ranks make one call each on tensors of their own; then the group still works."""

    def run(group: Group) -> Any:
        _, error = attempt(recipe, rejections, reads_only=read_only, seed=group.rank)
        whole = group.all_reduce(torch.ones(3))
        assert isinstance(whole, torch.Tensor) and whole.tolist() == [2.0] * 3
        return type(error)

    first, second = collectives.run_threads(2, run, timeout=20.0)
    assert first == second, (first, second)


def unlike(
    calls: Sequence[Recipe], rejections: Sequence[type[BaseException]], read_only: bool
) -> None:
    """Every rank makes a call of its own. A mismatch, too, has changed nothing."""

    def run(group: Group) -> Any:
        kinds = (*rejections, CollectiveMismatchError)
        try:
            return attempt(calls[group.rank], kinds, reads_only=read_only, seed=group.rank)[1]
        except CollectiveError as error:
            return error

    errors = collectives.run_threads(2, run, timeout=20.0)
    mismatches = [isinstance(error, CollectiveMismatchError) for error in errors]
    assert all(mismatches) or not any(mismatches), errors
    if all(mismatches):
        assert str(errors[0]) == str(errors[1])


def check(name: str, data: st.DataObject) -> None:
    """One call on both ranks, the same one or two."""
    strategy = recipes(DefaultGroup(), _signatures, name)
    recipe = data.draw(strategy)
    if data.draw(st.integers(0, 3)):
        alike(recipe, REJECTIONS, name in READ_ONLY)
    else:
        unlike([recipe, data.draw(strategy)], REJECTIONS, name in READ_ONLY)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_any_arguments_raise_only_documented_errors(name: str, data: st.DataObject) -> None:
    check(name, data)
