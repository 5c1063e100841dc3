"""The specification grammar: valid strings with a few characters changed."""

from __future__ import annotations

import re
import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from collectives.schedules.spec import (
    INNER,
    ONE_LEVEL,
    OUTER,
    format_all_reduce_spec,
    parse_all_reduce_spec,
)
from tests.fuzz.outcome import SETTINGS

_ALG = r"[a-z]+(#[0-9]+)?"
# What the grammar lets through, names and sizes of numbers aside.
_SPEC = re.compile(rf"{_ALG}(/{_ALG})?(:[0-9]+[KkMGT]?:{_ALG}(/{_ALG})?)*")

_shards = st.sampled_from(("", "#1", "#2", "#3", "#17"))
_one = st.builds("{}{}".format, st.sampled_from(ONE_LEVEL[1:]), _shards) | st.just("auto")
_two = st.builds(
    "{}{}/{}{}".format, st.sampled_from(INNER), _shards, st.sampled_from(OUTER), _shards
)
_limits = st.builds("{}{}".format, st.integers(1, 3000), st.sampled_from(["", *"KkMGT"]))
valid = st.builds(
    lambda first, rest: ":".join([first, *(part for pair in rest for part in pair)]),
    _one | _two,
    st.lists(st.tuples(_limits, _one | _two), max_size=2),
)


@st.composite
def mutated(draw: Any) -> str:
    """A valid string after one to three edits."""
    text = draw(valid)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 3)))
        new = draw(st.sampled_from([*"#:/-+ 0179kKgMGT_.\n\x00", "", "٣", "xring", "9" * 20]))
        text = text[:at] + new + text[end:]
    return text


@SETTINGS
@given(text=valid | mutated() | st.text(alphabet=string.printable))
def test_a_text_is_read_back_or_is_a_value_error(text: str) -> None:
    rejection = None
    try:
        specs = parse_all_reduce_spec(text)
    except ValueError as error:
        rejection = str(error)
    if rejection is not None:
        assert repr(text) in rejection
        return
    assert _SPEC.fullmatch(text)
    again = format_all_reduce_spec(specs)
    assert parse_all_reduce_spec(again) == specs
    assert format_all_reduce_spec(parse_all_reduce_spec(again)) == again
    limits = [spec.limit for spec in specs]
    assert limits[-1] == -1 and limits[:-1] == sorted(set(limits[:-1]))
    assert all(0 < spec.shards < 2**63 and 0 < spec.inner_shards < 2**63 for spec in specs)
