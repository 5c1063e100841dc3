"""What collectives answer is what the table has, and the tool sees what is not."""

from __future__ import annotations

import pytest
import torch

from tests.frozen import table
from tests.frozen.cases import TRANSPORTS, Case
from tests.frozen.errors import ERRORS
from tests.frozen.values import digest, values

HELD = table.read()
EXPECTED_INTEGERS = [23, -13, -70, -71, 71]
EXPECTED_REALS = [0.5574865341186523, -0.04895615577697754, -0.9424841403961182]


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


def test_digest_sees_one_bit_a_shape_and_a_dtype_but_no_nan_payload() -> None:
    x = values(9, torch.float32, "x")
    changed = x.clone()
    changed.view(torch.int32)[3] ^= 1
    assert len({digest([each]) for each in (x, changed, x.view(3, 3), x.view(torch.int32))}) == 4
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest([nan[:1]]) == digest([nan[1:]])


def test_inputs_are_those_that_the_table_was_made_with() -> None:
    """Integers that follow from counters alone, whatever the versions of torch and numpy."""
    assert values(5, torch.int64, "key").tolist() == EXPECTED_INTEGERS
    assert values(3, torch.float64, "key").tolist() == EXPECTED_REALS
