"""Every public name of `kernels` on awkward arguments: a TypeError or ValueError, or an answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kernels
from tests.fuzz.outcome import SETTINGS, Recipe, attempt
from tests.fuzz.values import (
    Arg,
    Look,
    Memory,
    constant,
    flag,
    float_looks,
    looks,
    optional,
    plain,
    segments,
    sometimes,
    tensor,
    tensors,
    value,
)

Strategy = st.SearchStrategy[Arg]
DTYPES = (None, torch.float32, torch.float16, torch.float64)
SCALES = (1.0, 0.5, 2, 1e-300, 1e300)

# Plain data, whose wrong values are passed to the functions that take them.
DATA = {"DTYPES", "Layout", "SPREAD_LIMIT"}
# What tests/kernels/cpu/test_native.py tries, and types that plans have.
OTHERS = {name for name in kernels.__all__ if "lan" in name} | {"BackendInfo", "backend_info"}


def _layouts(look: Look) -> Strategy:
    """None, the layout of a few tensors of this look, and layouts that no `layout_of` made."""

    def right(count: int, dtype: torch.dtype, changes: dict[str, Any]) -> Arg:
        def make(memory: Memory) -> kernels.Layout:
            tensors = [torch.zeros(look.shape, dtype=torch.float32)] * count
            return dataclasses.replace(kernels.layout_of(tensors, dtype=dtype), **changes)

        return Arg(f"layout_of({count} of {look.shape}, {dtype}, {changes})", make)

    numbers = st.sampled_from((0, 1, 5, 16, 64, -1, 2**62, None, 1.5, "a"))
    wrong: Strategy = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from((torch.int32, None, torch.float64)),
            "shapes": st.lists(st.just(look.shape) | numbers, max_size=3).map(tuple),
            "numels": st.lists(numbers, max_size=3).map(tuple),
            "offsets": st.lists(numbers, max_size=3).map(tuple) | st.none(),
            "numel": numbers,
            "alignment": numbers,
        },
    )
    count, dtype = st.integers(0, 4), st.sampled_from(DTYPES[1:])
    made = st.builds(right, count, dtype, st.just({}))
    return (
        st.just(constant(None))
        | made
        | sometimes(st.builds(right, count, dtype, wrong), value(None), 2)
    )


@functools.lru_cache(maxsize=256)
def _signatures(look: Look) -> dict[str, tuple[list[Strategy], dict[str, Strategy]]]:
    """What each function takes: positional arguments, and keywords that may be left out."""
    a, many, cuts = tensor(look), tensors(look), segments(look)
    out, found_inf, scale = optional(look), flag(), value(*SCALES)
    dtype, layout = value(*DTYPES), _layouts(look)
    rows = st.integers(0, 3).flatmap(lambda n: tensor(Look((n, 3), torch.float64)))
    table = st.tuples(st.integers(0, 3), st.integers(1, 3)).flatmap(
        lambda shape: tensor(Look(shape, torch.float64))
    )
    partials = st.tuples(st.integers(1, 2), st.integers(0, 3), st.integers(1, 3)).flatmap(
        lambda n: st.sampled_from((n[2], 2)).flatmap(
            lambda last: tensor(Look((*n, n[2], last)[: 4 + (last == 2)], torch.float64))
        )
    )
    spread = sometimes(st.just(constant(None)), optional(Look((2,), torch.float64)), 2)
    tree = value([], [(0, 1, 1, 1)], [(0, 1, 1, 1), (0, 2, 2.0, 1)], [(1, 0, 0, 1)], [(0, 0)], None)
    buffer = st.integers(0, 3).flatmap(
        lambda n: st.sampled_from((look.dtype, torch.float32)).map(
            lambda d: plain(Look((n * max(1, 64 // d.itemsize),), d), 4)
        )
    )
    buffer = sometimes(a, buffer, 4)
    packed = {"layout": layout, "scale": scale, "found_inf": found_inf, "max_abs": flag()}
    pair = {"out": out, "found_inf": found_inf, "max_abs": flag()}
    factors = {"alpha": scale, "beta": scale}
    sums = {"scale": scale, "order": value("list", "tree", "line"), "accumulate": dtype}
    weights = {"weights": value((1.0, 1.0), (3, 1), [0.5, 2.0], (0, 1), (1,))}
    return {
        "adasum": ([a, a], {"segments": cuts, **weights, **pair}),
        "adasum_bytes": ([a, a], {}),
        "adasum_reference": ([a, a], {"segments": cuts, **weights}),
        "adasum_coefficients": ([partials, tree], {"spread": spread, "out": table}),
        "adasum_coefficients_bytes": ([partials], {}),
        "adasum_coefficients_reference": ([partials, tree], {}),
        "combine": ([a, a, rows], {"segments": cuts, **weights, **pair}),
        "combine_bytes": ([a, a], {"segments": cuts}),
        "combine_reference": ([a, a, rows], {"segments": cuts, **weights}),
        "dot_and_norms": ([a, a], {"segments": cuts}),
        "dot_and_norms_bytes": ([a, a], {"segments": cuts}),
        "dot_and_norms_reference": ([a, a], {"segments": cuts}),
        "gram": ([many], {"segments": cuts, "precise": value(True, False)}),
        "gram_bytes": ([many], {"segments": cuts}),
        "gram_reference": ([many], {"segments": cuts}),
        "layout_of": ([many], {"dtype": dtype, "alignment": value(None, 64, 4, 256)}),
        "max_abs_reference": ([many], {}),
        "pack": ([many], {**packed, "out": sometimes(buffer, value(None), 2)}),
        "pack_bytes": ([many], {"layout": layout}),
        "pack_reference": ([many], {"layout": layout, "scale": scale}),
        "scaled_add": ([a, a], {**factors, **pair, "dtype": dtype}),
        "scaled_add_bytes": ([a, a], {"dtype": dtype}),
        "scaled_add_reference": ([a, a], factors),
        "sum_n": ([many], {**pair, **sums, "dtype": dtype}),
        "sum_n_bytes": ([many], {"dtype": dtype}),
        "sum_n_reference": ([many], sums),
        "unpack": ([buffer, many], packed),
        "unpack_bytes": ([buffer, many], {"layout": layout}),
        "unpack_reference": ([buffer, layout], {"scale": scale}),
        "weighted_sum": ([many, table], {"segments": cuts, **pair}),
        "weighted_sum_bytes": ([many], {"segments": cuts}),
        "weighted_sum_reference": ([many, table], {"segments": cuts}),
    }


NAMES = sorted(_signatures(Look((6,), torch.float32)))


@st.composite
def _recipes(draw: Any, name: str) -> Recipe:
    look = draw(sometimes(looks, float_looks, 4))
    positional, keywords = _signatures(look)[name]
    args = tuple(draw(strategy) for strategy in positional)
    given_names = [key for key in keywords if draw(st.booleans())]
    return Recipe(getattr(kernels, name), args, {key: draw(keywords[key]) for key in given_names})


def test_every_public_name_is_fuzzed() -> None:
    assert set(NAMES) | DATA | OTHERS == set(kernels.__all__)


def check(name: str, data: st.DataObject) -> None:
    """One call of the function: what it answers is right in kind, or it rejects."""
    reads_only = name.endswith(("_bytes", "_reference", "_norms", "_of"))
    answer, error = attempt(data.draw(_recipes(name)), reads_only=reads_only)
    if error is None and name.endswith("_bytes"):
        assert type(answer) is int and answer >= 0
    if isinstance(answer, Tensor) and reads_only:
        assert answer.layout is torch.strided and not answer.requires_grad


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_only_documented_errors(name: str, data: st.DataObject) -> None:
    check(name, data)
