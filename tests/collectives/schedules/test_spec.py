"""The specification string: the contract's table, and nothing but ValueError on any other text."""

from __future__ import annotations

import re

import pytest

from collectives.schedules.spec import (
    AllReduceSpec,
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
    "text",
    [
        *("+5", " 7 ", "1_000", "1g", "1.5k", "32kb", "0x10", "٣", "７", "1²"),
        *("", "k", "-1", "-1k", "0", "0k", "7\n", "1 k", "9" * 5000, str(2**63), "9999999T"),
    ],
)
def test_general_int_of_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_general_int(text)


def test_general_int_of_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes"):
        parse_general_int(b"7")  # type: ignore[arg-type]


def test_limits_are_inclusive() -> None:
    specs = parse_all_reduce_spec("rd:4:rechd:1k:xring")
    chosen = [spec_for(specs, numel).alg for numel in (0, 4, 5, 1024, 1025, 2**40)]
    assert chosen == ["rd", "rd", "rechd", "rechd", "xring", "xring"]
