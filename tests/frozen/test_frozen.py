"""What collectives answer is what the table has, and the tool sees what is not."""

from __future__ import annotations

import pytest

from tests.frozen import table
from tests.frozen.cases import TRANSPORTS, Case
from tests.frozen.errors import ERRORS

HELD = table.read()


def test_sample_answers_as_the_table_has_it() -> None:
    """Without gloo, whose ranks are processes, for the sake of time."""
    cases = [case for case in table.chosen(HELD, 200) if case.transport in TRANSPORTS]
    assert not table.differences(HELD, table.run(cases))


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_every_error_says_what_the_table_has() -> None:
    errors = [case for case in table.chosen(HELD) if case.kind == "error"]
    assert not table.differences(HELD, table.run(errors))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_answers_as_the_table_has_it() -> None:
    assert not table.differences(HELD, table.run(table.chosen(HELD)))


def test_every_error_is_in_the_table() -> None:
    held = {Case.parse(each).option for each in HELD.outcomes if each.startswith("error ")}
    assert held == set(ERRORS)


def test_changed_value_and_changed_text_are_listed() -> None:
    found = table.run([case for case in table.chosen(HELD, 60) if case.transport == "threads"])
    assert len(found) > 5
    for case, outcome in found.items():
        other = HELD._replace(outcomes=HELD.outcomes | {case: f"{outcome}!"})
        assert len(table.differences(other, found)) == 1
