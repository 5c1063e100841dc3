"""The specification string: the contract's table, and nothing but ValueError on any other text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.schedules.spec import (
    INNER,
    ONE_LEVEL,
    OUTER,
    AllReduceSpec,
    format_all_reduce_spec,
    parse_all_reduce_spec,
    parse_general_int,
    spec_for,
)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("xring", [("xring", 1, -1)]),
        ("xring#2", [("xring", 2, -1)]),
        (
            "pscpu:2k:pscpu#2:64k:xring",
            [("pscpu", 1, 2048), ("pscpu", 2, 65536), ("xring", 1, -1)],
        ),
        ("nccl/xring", [("nccl/xring", 1, -1)]),
        ("nccl/xring#2", [("nccl/xring", 2, -1)]),
        ("pscpu/pscpu#2", [("pscpu/pscpu", 2, -1)]),
        ("auto", [("auto", 1, -1)]),
        ("rd:1K:rechd:1M:vhdd", [("rd", 1, 1024), ("rechd", 1, 2**20), ("vhdd", 1, -1)]),
    ],
)
def test_examples_of_the_grammar_are_parsed(text: str, ranges: list[tuple[str, int, int]]) -> None:
    specs = parse_all_reduce_spec(text)
    assert specs == tuple(ranges)
    assert specs == tuple(AllReduceSpec(*r) for r in ranges)
    assert [(s.alg, s.shards, s.limit) for s in specs] == ranges


def test_every_name_and_every_pair_is_parsed() -> None:
    for name in ONE_LEVEL:
        (spec,) = parse_all_reduce_spec(name)
        assert (spec.inner, spec.outer) == (None, name)
    pairs = [(inner, outer) for inner in INNER for outer in OUTER]
    for inner, outer in pairs:
        (spec,) = parse_all_reduce_spec(f"{inner}#2/{outer}#3")
        assert (spec.alg, spec.inner, spec.outer) == (f"{inner}/{outer}", inner, outer)
        assert (spec.inner_shards, spec.shards) == (2, 3)


def test_inner_shards_are_part_of_equality() -> None:
    one, two = parse_all_reduce_spec("xring/rd:1k:xring#2/rd")
    assert dict.fromkeys([one, two]) == {one: None, two: None}
    assert two != AllReduceSpec("xring/rd", 1, -1)
    assert two == AllReduceSpec("xring/rd", 1, -1, inner_shards=2)
    assert hash(one) == hash(("xring/rd", 1, 1024))
    assert one != "xring/rd"
    alg, shards, limit = one
    assert (alg, shards, limit) == ("xring/rd", 1, 1024)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pscpu:32k", "not well formed"),
        ("xring:", "not well formed"),
        ("xring:2k:", "not well formed"),
        (":", "not well formed"),
        ("pscpu:foo:xring", "non-integer range 'foo'"),
        ("pscpu::xring", "non-integer range ''"),
        ("pscpu:1g:xring", "non-integer range '1g'"),
        ("pscpu:9999999999999999999:xring", "non-integer range '9999999999999999999'"),
        ("bogus", "invalid algorithm 'bogus'.*xring"),
        ("", "invalid algorithm ''.*xring"),
        (" xring", "invalid algorithm ' xring'"),
        ("XRING", "invalid algorithm 'XRING'"),
        ("vhdd/xring", "invalid algorithm 'vhdd/xring'.*inner/outer"),
        ("xring/nccl", "invalid algorithm 'xring/nccl'"),
        ("auto/xring", "invalid algorithm 'auto/xring'"),
        ("xring/auto", "invalid algorithm 'xring/auto'"),
        ("xring/rd/rd", "invalid algorithm 'xring/rd/rd'"),
        ("/", "invalid algorithm '/'"),
        ("xring#x", "shard count 'x'"),
        ("xring#", "shard count ''"),
        ("xring#0", "shard count '0'"),
        ("xring#-3", "shard count '-3'"),
        ("xring#2#3", "shard count '2#3'"),
        ("xring#2k", "shard count '2k'"),
        ("xring#٣", "shard count '٣'"),
        ("xring#0/rd", "shard count '0'"),
        ("auto#2", "shard count, got '2'"),
        ("xring:64k:nccl:2k:pscpu", "positive and ascending"),
        ("xring:2k:nccl:2k:pscpu", "positive and ascending"),
        ("xring:-1:nccl", "positive and ascending"),
        ("xring:0:nccl", "positive and ascending"),
    ],
)
def test_errors_name_the_part(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_all_reduce_spec(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("007", 7),
        ("2k", 2048),
        ("2K", 2048),
        ("3M", 3 * 2**20),
        ("4G", 2**32),
        ("5T", 5 * 2**40),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_general_int_with_a_suffix_is_parsed(text: str, value: int) -> None:
    assert parse_general_int(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("+5", " 7 ", "1_000", "1g", "1.5k", "32kb", "0x10", "٣", "７", "1²"),
        *("", "k", "-1", "-1k", "0", "0k", "7\n", "1 k", "9" * 5000, str(2**63), "9999999T"),
    ],
)
def test_general_int_of_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_general_int(text)


@pytest.mark.parametrize("value", [None, 7, b"7", ["xring"]])
def test_values_that_are_no_strings_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_general_int(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_all_reduce_spec(value)  # type: ignore[arg-type]


def test_limits_are_inclusive() -> None:
    specs = parse_all_reduce_spec("rd:4:rechd:1k:xring")
    chosen = [spec_for(specs, numel).alg for numel in (0, 4, 5, 1024, 1025, 2**40)]
    assert chosen == ["rd", "rd", "rechd", "rechd", "xring", "xring"]


_shards = st.sampled_from(["", "#1", "#2", "#17"])
_level = st.builds(str.__add__, st.sampled_from(ONE_LEVEL[1:]), _shards)
_pair = st.builds(
    "{}{}/{}{}".format, st.sampled_from(INNER), _shards, st.sampled_from(OUTER), _shards
)
_limits = st.lists(st.integers(1, 2**63 - 1), max_size=4, unique=True).map(sorted)


@given(_limits, st.data())
def test_what_is_parsed_is_written_back(limits: list[int], data: st.DataObject) -> None:
    count = len(limits) + 1
    algs = data.draw(st.lists(_level | _pair | st.just("auto"), min_size=count, max_size=count))
    text = algs[-1]
    for alg, limit in zip(reversed(algs[:-1]), reversed(limits), strict=True):
        text = f"{alg}:{limit}:{text}"
    specs = parse_all_reduce_spec(text)
    assert format_all_reduce_spec(specs) == text.replace("#1:", ":").replace(
        "#1/", "/"
    ).removesuffix("#1")
    assert parse_all_reduce_spec(format_all_reduce_spec(specs)) == specs
    assert [s.limit for s in specs] == [*limits, -1]
