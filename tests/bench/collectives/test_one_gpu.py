"""The bench of ranks on one GPU: its arithmetic over ranks that are threads, without NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import collectives
from adasum import Adasum
from bench.collectives import one_gpu
from collectives.transport import ThreadWorld

CPU = torch.device("cpu")


def rows(ranks: int) -> dict[str, one_gpu.Row]:
    world = ThreadWorld(ranks)
    found = one_gpu.run(ranks, 1001, 3, CPU, world.transport, ["rechd", "vhdd"])
    return {row.algorithm: row for row in found}


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_all_ranks_are_right_and_timed(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(ranks)
    assert [*found] == ["rechd", "vhdd"]
    for name, redop in (("rechd", "sum"), ("vhdd", "adasum")):
        row = found[name]
        assert (row.wrong, row.size, row.redop, len(row.seconds)) == (0, 4004, redop, 3)
        assert min(row.seconds) > 0


def test_elements_that_are_wrong_are_counted_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = one_gpu.expected

    def off(terms: list[torch.Tensor], op: collectives.Reducer) -> torch.Tensor:
        want = right(terms, op)
        if op is Adasum:
            want[5] += 1e-3
        return want

    monkeypatch.setattr(one_gpu, "expected", off)
    found = rows(2)
    assert (found["rechd"].wrong, found["vhdd"].wrong) == (0, 2)


def test_record_has_what_the_page_of_a_gpu_run_reads() -> None:
    record = one_gpu.record([*rows(2).values()], "a GPU")
    assert record["device"] == "a GPU"
    first = record["results"][0]
    assert (first["algorithm"], first["ranks"], first["wrong"]) == ("rechd", 2, 0)
    assert first["median"] * 1e6 == pytest.approx(first["time"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "bench.collectives.one_gpu"]
    root = Path(one_gpu.__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench.collectives.one_gpu: torch sees no GPU here\n"
