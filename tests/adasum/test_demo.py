"""The acts of the demo, as a user starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.commands import python


def shown(act: int, out: Path) -> str:
    pytest.importorskip("sklearn")
    return python("-m", "adasum.demo", "--act", str(act), "--out", out, timeout=170)


@pytest.mark.slow
def test_first_act_has_one_hash_of_ours_and_three_of_gloos(tmp_path: Path) -> None:
    text = shown(1, tmp_path)
    assert len(set(re.findall(r"adasum (\w{12})", text))) == 1
    assert len(set(re.findall(r"gloo (\w{12})", text))) == 3
    assert "the same bits on 8, 4 and 2 ranks" in text


def test_second_act_names_the_rank_that_stops(tmp_path: Path) -> None:
    text = shown(2, tmp_path)
    assert "rank 2: is stopped" in text
    assert len(re.findall(r"rank \d: CollectiveTimeoutError: .*no answer from rank 2", text)) == 3
    assert "CULPRIT: rank 2" in text


@pytest.mark.slow
def test_third_act_makes_a_picture_in_which_adasum_learns(tmp_path: Path) -> None:
    text = shown(3, tmp_path)
    reached = {name: float(part) for name, part in re.findall(r"(Sum|Adasum), .* ([\d.]+)%", text)}
    assert reached["Adasum"] > 90.0 > 20.0 > reached["Sum"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
