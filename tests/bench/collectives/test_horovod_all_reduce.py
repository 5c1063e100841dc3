"""The bench beside Horovod, without Horovod: its table, its refusals, its two kinds of process."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kernels
from bench.collectives import horovod_all_reduce as bench
from tests.processes.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]
# Stands for Horovod's interpreter, and for mpirun where its first argument is "rank".
STAND_IN = """\
import json, sys
if sys.argv[1] != "rank":
    sys.exit()
if "-w" in sys.argv:
    sys.exit("a rank fell")
rows = [{"size": 64, "redop": "sum", "time": time} for time in (7.0, 1e9)]
with open(sys.argv[-1], "w") as file:
    json.dump({"environment": {"load": 0.5}, "results": rows}, file)
"""


def _turn(horovod: float, ours: float, torchs: float) -> dict[str, Any]:
    def results(*times: float) -> dict[str, Any]:
        rows = [{"size": 4096, "redop": "sum", "time": time} for time in times[:2]]
        more = [{"size": 8192, "redop": "adasum", "time": time} for time in (1.0, times[1] * 4)]
        return {"results": [*rows, *more]}

    return {"horovod": results(-1.0, horovod), "ours": results(torchs, ours)}


def test_the_table() -> None:
    found = bench.lines([_turn(40, 20, 5), _turn(10, 20, 6), _turn(30, 10, 9)])
    assert [(line.size, line.redop) for line in found] == [(4096, "sum"), (8192, "adasum")]
    assert (found[0].horovod, found[0].ours, found[0].torch) == (
        [40, 10, 30],
        [20, 20, 10],
        [5, 6, 9],
    )
    # The ratio of the medians, and the span of the turns' own.
    assert found[0].ratio == 1.5
    assert str(found[0]).split() == ["4096", "sum", "30.0", "20.0", "6.0", "1.50", "0.50-3.00"]
    assert bench.table(found)[-1] == "# Ours is never slower"
    slow = bench.lines([_turn(10, 20, 5)])
    assert bench.table(slow)[-1] == "# Ours is slower: sum at 4096 (0.50), adasum at 8192 (0.50)"
    assert all(len(text) <= len(str(found[0])) for text in bench.table(found)[:2])


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An executable that stands for Horovod's interpreter."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.5")
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{STAND_IN}")
    path.chmod(0o755)
    return str(path)


def _arguments(interpreter: str, *more: str) -> list[str]:
    options = ["--horovod-python", interpreter, "--mpirun", f"{interpreter} rank"]
    return [*options, *["-b", "64", "-e", "64", "-n", "2", "-o", "sum", "--turns", "2"], *more]


@pytest.mark.slow
def test_run_of_both_sides_takes_turns(
    interpreter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert bench.main(_arguments(interpreter, "-a", "rd", "-J", str(path))) == 0
    said = capsys.readouterr().out
    # In turns: the side that was last begins the next.
    starts = [text.split(":")[0] for text in said.splitlines() if text.startswith("# turn")]
    assert starts == [f"# turn {t}" for t in ("1, horovod", "1, ours", "2, ours", "2, horovod")]
    record = json.loads(path.read_text())
    (line,) = record["lines"]
    assert line["horovod"] == [1e9, 1e9] and line["ratio"] > 1
    ours = [turn["ours"]["results"] for turn in record["turns"]]
    assert [row["algorithm"] for row in ours[0]] == ["torch", "rd"]
    assert line["ours"] == [rows[1]["time"] for rows in ours]
    assert line["torch"] == [rows[0]["time"] for rows in ours]
    assert record["variables"] == {"HOROVOD_CYCLE_TIME": "0.5"}
    assert record["commands"]["horovod"][:4] == [interpreter, "rank", "-n", "2"]


def test_run_that_fails_says_why(interpreter: str) -> None:
    with pytest.raises(SystemExit, match=r"(?s)rank -n 2 .* exit 1\n.*a rank fell"):
        bench.main(_arguments(interpreter, "-w", "1"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 3 -o adasum", "--ranks must be 2, 4, 8"),
        ("--ranks 1", "--ranks must be 2, 4, 8"),
        ("--turns 0", "1 or more --turns"),
        ("-a rd,xring", "one algorithm"),
        ("-a bogus", "bogus"),
        ("--model", "no --model"),
        ("-f 1", "-f must be at least 2"),
        ("--horovod-python /nowhere/python", "/nowhere/python"),
        ("--horovod-python false", "must be an interpreter with Horovod"),
    ],
)
def test_options_that_are_refused(
    arguments: str, text: str, interpreter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(_arguments(interpreter, *arguments.split()))
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def _stand_in(folder: Path, truthful: bool) -> ModuleType:
    """horovod.torch by torch's gloo; untruthful, it gives the sum for Adasum."""
    hvd: Any = ModuleType("horovod.torch")
    hvd.Sum, hvd.Average, hvd.Adasum = "Sum", "Average", "Adasum"
    hvd.init = lambda: None
    hvd.rank, hvd.size = (lambda: int(os.environ["RANK"])), (lambda: int(os.environ["WORLD_SIZE"]))

    def broadcast_object(value: int, root_rank: int) -> int:
        path = folder / "port"
        if hvd.rank() == root_rank:
            (folder / "new").write_text(str(value))
            (folder / "new").rename(path)
        while not path.exists():
            time.sleep(0.01)
        return int(path.read_text())

    def allreduce_(tensor: torch.Tensor, op: str, name: str) -> None:
        if op == "Sum" or not truthful:
            dist.all_reduce(tensor)
            return
        parts = [torch.empty_like(tensor) for _ in range(hvd.size())]
        dist.all_gather(parts, tensor.clone())
        tensor.copy_(kernels.adasum_reference(*(part.double() for part in parts)))

    hvd.broadcast_object, hvd.allreduce_ = broadcast_object, allreduce_
    return hvd


def _rank(rank: int, folder: Path, truthful: bool) -> int:
    horovod: Any = ModuleType("horovod")
    horovod.torch = _stand_in(folder, truthful)
    sys.modules.update({"horovod": horovod, "horovod.torch": horovod.torch})
    os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
    flags = "-b 4K -e 64K -f 16 -n 2 -w 0 -o sum,adasum --device cpu -J"
    return bench.main([*flags.split(), str(folder / "out.json")])


@pytest.mark.parametrize("truthful", [True, False])
def test_ranks_of_horovod_are_checked_and_timed(truthful: bool, tmp_path: Path) -> None:
    """Whoever gives a wrong answer ends with 1, which ends the whole bench."""
    assert run_ranks(2, _rank, tmp_path, truthful) == [int(not truthful)] * 2
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["redop"] for row in rows] == ["sum", "sum", "sum", "adasum"] * 2
    assert all(row["time"] > 0 for row in rows)
    assert all((row["wrong"] > 0) == (not truthful and row["redop"] == "adasum") for row in rows)
