"""The installed benchmark: its answers, its figures, what it says of wrong flags and elements."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

import collectives
from collectives.tools import bench
from tests.processes.commands import python
from tests.processes.harness import run_ranks

SIZE = 3


class _Off:
    """A group whose all-reduce moves one element of rank 1's result."""

    def __init__(self, group: collectives.Group, moved: Callable[[torch.Tensor], None]) -> None:
        self._group, self._moved = group, moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        self._group.all_reduce(tensor, *args, **options)
        if self._group.rank == 1:
            self._moved(tensor)


def _flags(**given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_flags(parser)
    flags = {"op": "sum", "algorithm": "rd", "iters": 2, "warmup_iters": 1, "stepfactor": 8}
    return argparse.Namespace(**vars(parser.parse_args([])) | flags | given)


def _said(moved: Callable[[torch.Tensor], None] = lambda tensor: None, **given: Any) -> list[str]:
    """What rank 0 says of a run of threads; all ranks count the same wrong elements."""

    def main(group: collectives.Group) -> tuple[int, list[str]]:
        lines: list[str] = []
        off: Any = _Off(group, moved)
        return bench.run(off, torch.device("cpu"), _flags(**given), lines.append), lines

    found = collectives.run_threads(SIZE, main)
    assert len({wrong for wrong, _ in found}) == 1
    lines = found[0][1]
    assert f"# Wrong elements: {found[0][0]} {'FAILED' if found[0][0] else 'OK'}" in lines
    return lines


def _rows(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if line.startswith(" ")]


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_rows_are_right_and_have_nccl_tests_figures(dtype: str) -> None:
    ops = "sum,avg,max,min" if bench.DTYPES[dtype].is_floating_point else "sum,max,min"
    options = {"minbytes": "1", "maxbytes": "512", "datatype": dtype, "op": ops, "check": 2}
    lines = _said(**options, algorithm="rd,psgpu#2")
    titles = "# size count type redop algorithm time algbw busbw #wrong"
    assert lines[1].split() == titles.split()
    rows = _rows(lines)
    itemsize = bench.DTYPES[dtype].itemsize
    sizes = [size - size % itemsize for size in (1, 8, 64, 512)]
    assert [row[3:5] for row in rows[:2]] == [["sum", "rd"], ["sum", "psgpu#2"]]
    assert [int(row[0]) for row in rows[:: 2 * len(ops.split(","))]] == sizes
    for row in rows:
        assert int(row[1]) * itemsize == int(row[0]) and row[2] == dtype and row[8] == "0"
        assert float(row[5]) > 0


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """1 GB in half a second on 4 ranks: algbw 2 GB/s, of which each rank sends 2 · 3/4."""
    assert bench.bandwidths(10**9, 0.5, 4) == (2.0, 3.0)
    assert bench.bandwidths(10**9, 0.5, 1) == (2.0, 0.0)


def _one_more(tensor: torch.Tensor) -> None:
    tensor[-1] += 1


def _nan(tensor: torch.Tensor) -> None:
    tensor[0] = torch.nan


def _next_number(tensor: torch.Tensor) -> None:
    tensor[0] = torch.nextafter(tensor[0], torch.tensor(torch.inf))


@pytest.mark.parametrize(
    ("moved", "op", "dtype"),
    [
        (_one_more, "sum", "float32"),
        (_one_more, "sum", "uint8"),
        (_one_more, "avg", "bfloat16"),
        (_nan, "sum", "float16"),
        (_nan, "max", "float64"),
        # No rounding explains another number than the ranks' own.
        (_next_number, "min", "float32"),
    ],
)
def test_wrong_elements_of_one_rank_are_counted(
    moved: Callable[[torch.Tensor], None], op: str, dtype: str
) -> None:
    lines = _said(moved, minbytes="4K", maxbytes="4K", op=op, datatype=dtype, check=3)
    assert [row[8] for row in _rows(lines)] == ["3"]


def test_elements_behind_a_block_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_BLOCK", 100)
    right = _said(minbytes="1040", maxbytes="1040", datatype="float32")
    wrong = _said(_one_more, minbytes="1040", maxbytes="1040", datatype="float32")
    assert (_rows(right)[0][8], _rows(wrong)[0][8]) == ("0", "1")


def test_operator_of_a_module_is_timed_and_not_checked() -> None:
    lines = _said(minbytes="64", maxbytes="64", datatype="float32", op="adasum:Adasum")
    assert _rows(lines)[0][8] == "N/A"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("", "needs ranks: --ranks 2 starts them"),
        ("-d foo", "-d must be one of float16"),
        ("-o nope", "-o must be of sum, avg, max, min or MODULE:NAME, got 'nope'"),
        ("-o torch:nn", "-o must be of sum, avg, max, min or MODULE:NAME, got 'torch:nn'"),
        ("-o avg -d int8", "-o avg needs a floating -d"),
        ("-b 1q", "-b: '1Q' is not a positive integer"),
        ("-b 2M -e 1M", "-b must not be more than -e, got 2M and 1M"),
        ("-f 1", "-f must be at least 2"),
        ("-n x", "argument -n/--iters: invalid int value"),
        ("-a rdd", "invalid algorithm 'rdd'"),
        ("--ranks 1", "--ranks must be at least 2"),
    ],
)
def test_errors_name_the_flag(
    flags: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        bench.main(flags.split())
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_ranks_are_started_by_torchrun_with_the_other_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(subprocess, "call", lambda command, env: started.append(command) or 1)
    assert bench.main(["-b", "8", "--ranks", "2", "-e", "64"]) == 1
    assert started[0][1:] == [
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        *["-m", "collectives.bench", "-b", "8", "-e", "64"],
    ]


def _status(rank: int, flags: str) -> int:
    return bench.main(flags.split())


def test_ranks_of_a_launcher_return_a_status() -> None:
    assert run_ranks(2, _status, "-b 1K -e 1K -n 1 -w 0 --device cpu") == [0, 0]


@pytest.mark.slow
def test_algorithm_that_cannot_run_is_an_error_on_all_ranks() -> None:
    assert run_ranks(2, _status, "-o max -a collective -b 1K -e 1K --device cpu") == [2, 2]


@pytest.mark.slow
def test_command_starts_ranks_and_prints_a_table() -> None:
    said = python("-m", "collectives.bench", "--ranks", "2", "-b", "4K", "-e", "8K")
    assert len(_rows(said.splitlines())) == 2
    assert "# Wrong elements: 0 OK" in said
