"""`python -m collectives.flight` on made-up files: its statuses, and the waits it follows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from collectives.flight.__main__ import main

HOST = "a"
T = 1_000_000.0


def call(number: int, begun: float, ended: float | None = None, **more: Any) -> dict[str, Any]:
    """A call of the group "init", or another; it was negotiated when it ended."""
    said = {"group": "init", "number": number, "kind": "all_reduce", "name": "loss", "code": 0}
    times: dict[str, float | None] = {"begun": T + begun, "negotiated": None, "ended": None}
    if ended is not None:
        times["ended"] = T + ended
        if not more.get("error"):
            times["negotiated"] = T + ended
    return {**said, "tensors": ["shape (2,)"], "error": "", "state": "", **times, **more}


def group(name: str, ranks: tuple[int, int], last: Any, **more: Any) -> dict[str, Any]:
    """A rank's part in a group."""
    members = [*range(ranks[0], ranks[1] + 1)]
    return {"name": name, "ranks": members, "last": last, "error": "", "aborted": None, **more}


EMPTY: dict[str, Any] = {
    "flight": 1,
    "job": "j",
    "rank": 0,
    "host": HOST,
    "written": T + 100.0,
    "stack": [],
    "groups": [],
    "calls": [],
}


def write(folder: Path, rank: int, calls: list[Any], groups: list[Any], **more: Any) -> None:
    """One rank's file."""
    text = json.dumps({**EMPTY, "rank": rank, "calls": calls, "groups": groups, **more})
    (folder / f"flight-{more.get('job', 'j')}-rank{rank}.json").write_text(text)


def run(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> tuple[int, str, str]:
    """Status and what is printed."""
    status = main([str(each) for each in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_ranks_that_go_on_are_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, number in enumerate((3, 5)):
        # One of them was at work in a call when the signal came, and the other one is further.
        calls = [call(i, i, i + 0.01) for i in range(number)] + [call(number, 99.9)]
        write(tmp_path, rank, calls, [group("init", (0, 1), calls[-1])])
    status, out, _ = run(capsys, tmp_path)
    assert (status, "nothing is wrong" in out) == (1, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no flight record"),
        ("[" * 100_000, "is no flight record"),
        ("[]", "is no flight record"),
        ('{"flight": 2}', "is in format 2"),
        ('{"flight": 1}', "is no flight record"),
        (json.dumps({**EMPTY, "written": "soon"}), "no flight record"),
        (json.dumps({**EMPTY, "written": 1e300}), "no flight record"),
        (json.dumps({**EMPTY, "calls": [3]}), "no flight record"),
        (json.dumps({**EMPTY, "groups": [{"name": "init"}]}), "no flight record"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_record_is_status_2(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flight-rank0.json"
    if text is not None:
        path.write_text(text)
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "") and said in err


def test_terminals_escape_sequences_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = call(3, 10.0, 14.0, error="ValueError: \x1b[2J\n")
    write(tmp_path, 0, [last], [group("init", (0, 1), last)], host="a\x1b[2J")
    write(tmp_path, 1, [], [group("init", (0, 1), call(3, 10.0))])
    status, out, _ = run(capsys, tmp_path)
    assert status == 0 and "failed by an error of its own" in out and "\x1b" not in out


def test_files_of_two_jobs_none_and_a_second_one_of_a_rank_are_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, tmp_path)[0] == 2
    write(tmp_path, 0, [], [])
    write(tmp_path, 1, [], [], job="k")
    status, _, err = run(capsys, *sorted(tmp_path.iterdir()))
    assert status == 2 and "of job k" in err
    status, _, err = run(capsys, *[tmp_path / "flight-j-rank0.json"] * 2)
    assert status == 2 and "second file of rank 0" in err


def test_folder_of_several_jobs_gives_the_one_that_wrote_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, job in enumerate(("m", "k", "l")):
        write(tmp_path, 0, [], [], job=job)
        os.utime(tmp_path / f"flight-{job}-rank0.json", (0, (5, 9, 7)[at]))
    status, out, _ = run(capsys, tmp_path)
    assert status == 1 and "of job k," in out


def test_wait_is_followed_through_groups_to_the_rank_that_waits_for_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for 1 in one group, 1 for 2 in another, 2 for 3; 3 is in no call."""
    for rank in range(3):
        last = call(7, 10.0, group=f"g{rank}")
        groups = [group(f"g{rank}", (rank, rank + 1), last)]
        if rank:
            before = call(6, 1.0, 2.0, group=f"g{rank - 1}")
            groups.append(group(f"g{rank - 1}", (rank - 1, rank), before))
        write(tmp_path, rank, [last], groups)
    last = call(6, 1.0, 2.0, group="g2")
    stack = ["Current thread 0x1 (most recent call first):", 'File "train.py", line 7 in save']
    write(tmp_path, 3, [last], [group("g2", (2, 3), last)], stack=stack)
    status, out, _ = run(capsys, tmp_path)
    assert status == 0 and out.count("CULPRIT") == 1
    assert "CULPRIT: rank 3 on a has not made all_reduce 'loss'" in out and "line 7 in save" in out
    for rank in range(3):
        assert (
            f"rank {rank} in all_reduce 'loss' of shape (2,) (call 7 of g{rank}): waits for" in out
        )
    assert len(out.splitlines()) < 25 and max(map(len, out.splitlines())) <= 160


ABORTED = [100.0 + T, "called abort(): disk is full"]


@pytest.mark.parametrize("waits", ["in the call", "in an earlier one"])
def test_rank_that_aborts_because_another_one_is_late_is_not_named(
    waits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its = call(3, 90.0, 100.0, error="TransportError: rank 0 called abort()", group="part")
    if waits == "in an earlier one":
        its = call(3, 90.0, 99.0, error="CollectiveTimeoutError: rank 0", group="part")
    groups = [group("part", (0, 1), its), group("init", (0, 1), None)]
    groups[0 if waits == "in the call" else 1]["aborted"] = ABORTED
    write(tmp_path, 0, [its], groups)
    before = call(2, 89.0, 89.5, group="part")
    write(tmp_path, 1, [before], [group("part", (0, 1), before)])
    status, out, _ = run(capsys, tmp_path)
    assert status == 0 and out.count("CULPRIT: rank 1 on a has not made") == out.count("CULPRIT")


def test_rank_that_came_just_after_a_failure_is_not_named_for_the_killed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, begun in ((0, 10.0), (1, 10.002)):
        last = call(3, begun, begun + 0.001, error="CollectiveTimeoutError: no answer from rank 2")
        write(tmp_path, rank, [last], [group("init", (0, 2), last)])
    status, out, _ = run(capsys, tmp_path)
    assert status == 0 and "CULPRIT: rank 2" in out and "late" not in out
