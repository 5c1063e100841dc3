"""Faults of real processes, one group of three ranks each: the promised error, in time.

Nothing is left of the group afterwards. The cases are in cases.py. They mostly wait, so several run
at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.cases import CASES, EXIT, GRACE, QUICK, Case
from tests.faults.ranks import Report, carry_out
from tests.processes.nursery import nursery
from tests.processes.test_nccl import why_not

AT_ONCE = 4
MARKED = [
    pytest.param(case, id=str(case), marks=() if str(case) in QUICK else pytest.mark.slow)
    for case in CASES
]


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future[Report]]]:
    """Every selected case's report, under way."""
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_fault_of_a_rank_is_the_promised_error_on_the_others.__name__
    ]
    wanted = [case for case in wanted if case.transport != "nccl" or not why_not()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {
            case: pool.submit(carry_out, case, nursery(), tmp_path_factory.mktemp("fault"))
            for case in wanted
        }
        yield futures
        for future in futures.values():
            future.cancel()


def test_cases_have_names_of_their_own() -> None:
    names = [str(case) for case in CASES]
    assert len({*names}) == len(names) >= 25
    assert set(names) >= QUICK


@pytest.mark.parametrize("case", MARKED)
def test_fault_of_a_rank_is_the_promised_error_on_the_others(
    case: Case, reports: dict[Case, Future[Report]]
) -> None:
    if case.transport == "nccl" and (reason := why_not()):
        pytest.skip(reason)
    report = reports[case].result()
    others = [rank for rank in range(case.size) if rank != case.victim]
    for rank in others:
        assert report.statuses[rank] == (1 if case.errors else 0), report.said[rank]
        if case.errors:
            _check_error(case, report, rank)
        else:
            _check_end(case, report, rank)
    if case.victim >= 0:
        _check_victim(case, report)
    assert not report.left


def _check_error(case: Case, report: Report, rank: int) -> None:
    error = report.one(rank, "error")
    text = error["text"]
    assert set(case.errors) & set(error["kinds"]), report.said[rank]
    began = [line["when"] for line in report.diaries[rank] if line["what"] in ("start", "step")]
    # From the fault, or from the call that met it where the rank made that later.
    since = began[-1]
    if report.fault is not None:
        since = max(since, report.fault)
    if "CollectiveMismatchError" not in case.errors:
        assert error["when"] - since <= case.timeout + GRACE, report.said[rank]
    # Who: a rank, and in a call also which step of it.
    assert re.search(r"\brank \d+", text), text
    if report.entries(rank, "in") and case.where != "store gone" and case.victim >= 0:
        assert re.search(r"in step \d|ranks disagree", text), text
    ended = report.ended[rank]
    assert ended is not None
    assert ended - error["when"] <= EXIT, "it hung at exit"


def _check_end(case: Case, report: Report, rank: int) -> None:
    end = report.one(rank, "end")
    began = report.one(rank, "step")["when"]
    bound = case.timeout + GRACE
    assert report.fault is not None
    assert end["when"] - max(report.fault, began) <= bound + case.late, report.said[rank]
    ended = report.ended[rank]
    assert ended is not None
    # What nobody waited for ends at exit, and is waited for no longer than its timeout.
    assert ended - end["when"] <= (bound + EXIT if case.where == "unwaited" else EXIT)


def _check_victim(case: Case, report: Report) -> None:
    assert report.statuses[case.victim] == case.victim_status, report.said[case.victim]
    if case.errors and report.entries(case.size - 1 - case.victim, "in"):
        assert report.named == [case.victim]
    if case.what in ("late", "stop and go on") and case.errors:
        error = report.one(case.victim, "error")
        assert "CollectiveError" in error["kinds"], error
        back = report.entries(case.victim, "goes on")
        assert report.fault is not None
        since = back[-1]["when"] if back else report.fault + case.late
        assert error["when"] - since <= case.timeout + GRACE


def test_fault_of_a_rank_is_named_by_another_rank(reports: dict[Case, Future[Report]]) -> None:
    """Each names whom it waits for; somebody waits for the one at fault."""
    for case, future in reports.items():
        if case.victim < 0 or not case.errors:
            continue
        report = future.result()
        texts = [report.one(rank, "error")["text"] for rank in range(case.size)
                 if rank != case.victim]  # fmt: skip
        assert any(re.search(rf"\brank {case.victim}\b", text) for text in texts), (case, texts)
