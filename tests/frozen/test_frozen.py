"""What collectives answer is what the table has, and the tool sees what is not."""

from __future__ import annotations

import pytest
import torch

from tests.frozen import table
from tests.frozen.cases import TRANSPORTS, Case, draw
from tests.frozen.errors import ERRORS
from tests.frozen.values import digest, values

HELD = table.read()
EXPECTED_INTEGERS = [23, -13, -70, -71, 71]
EXPECTED_REALS = [0.5574865341186523, -0.04895615577697754, -0.9424841403961182]


def test_sample_answers_as_the_table_has_it() -> None:
    """Without gloo, whose ranks are processes, for the sake of time."""
    cases = [case for case in table.chosen(HELD, 200) if case.transport in TRANSPORTS]
    assert not table.differences(HELD, table.run(cases))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_answers_as_the_table_has_it() -> None:
    assert not table.differences(HELD, table.run(table.chosen(HELD)))


def test_every_error_is_in_the_table() -> None:
    held = {Case.parse(each).option for each in HELD.outcomes if each.startswith("error ")}
    assert held == set(ERRORS)


def test_case_is_read_back_from_its_string() -> None:
    cases = [*draw(1, 50), *table.error_cases()]
    assert [Case.parse(str(case)) for case in cases] == cases


def test_sample_is_the_same_for_a_seed() -> None:
    assert draw(5, 200) == draw(5, 200) != draw(6, 200)


def test_changed_value_and_changed_text_are_listed() -> None:
    found = table.run([case for case in table.chosen(HELD, 60) if case.transport == "threads"])
    assert len(found) > 5
    for case, outcome in found.items():
        other = HELD._replace(outcomes=HELD.outcomes | {case: f"{outcome}!"})
        assert len(table.differences(other, found)) == 1


def test_lists_of_algorithms_are_not_compared() -> None:
    for one, other in (
        ("'rdd': use one of auto, rd, rechd, vhdd, or", "'rdd': use one of auto, new, rechd, or"),
        ("use direct, bruck, oneshot", "use bruck, oneshot, psgpu"),
    ):
        held = HELD._replace(outcomes={"case": f"ValueError: {one}"})
        assert not table.differences(held, {"case": f"ValueError: {other}"})
        assert table.differences(held, {"case": f"ValueError: {one}, please"[:-1] + "!"})


def test_other_backend_leaves_out_dot_products() -> None:
    other = HELD._replace(made={**HELD.made, "backend": "another"})
    left = table.chosen(other)
    assert 0 < len(left) < len(HELD.outcomes)
    assert not any(case.op.startswith("Adasum") for case in left)


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
