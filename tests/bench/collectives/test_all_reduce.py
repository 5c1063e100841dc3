"""The all-reduce bench: its answers, its figures, its options, and the cost model held to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collectives
import kernels
from bench.collectives import all_reduce
from bench.collectives.answer import Average, count_wrong, expected, inputs, tree_of
from bench.collectives.cost_model import Comparison, report
from bench.collectives.row import Row, header, line
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from tests.processes.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def _tree(text: str, topology: Topology) -> Any:
    (spec,) = parse_all_reduce_spec(text)
    return tree_of(spec, topology)


def test_trees() -> None:
    assert _tree("vhdd", Topology(4, 4)) == ((0, 1), (2, 3))
    assert _tree("rd", Topology(6, 6)) == (((0, 1), (2, 3)), (4, 5))
    assert _tree("auto", Topology(3, 3)) == ((0, 1), 2)
    assert _tree("xring", Topology(4, 4)) == (((0, 1), 2), 3)
    two = (Average((0, 1)), Average((2, 3)))
    assert _tree("xring/vhdd", Topology(4, 2)) == two
    assert _tree("rechd/psgpu", Topology(6, 2)) == (two, Average((4, 5)))
    assert _tree("rd", Topology(1, 1)) == 0


def _truth(tree: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, int):
        return parts[tree].double()
    if isinstance(tree, Average):
        return torch.stack([parts[rank].double() for rank in tree.ranks]).mean(0)
    p, q = map(_count, tree)
    return kernels.adasum_reference(*(_truth(side, parts) for side in tree), weights=(p, q))


def _count(tree: Any) -> int:
    """How many ranks a tree joins."""
    if isinstance(tree, Average):
        return len(tree.ranks)
    return 1 if isinstance(tree, int) else sum(map(_count, tree))


def _answers(rank: int, size: int) -> list[str]:
    """What is wrong with the answers and the counts, as one rank sees it."""
    dist.init_process_group("gloo")
    faults = []
    topology = Topology(size, size)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32):
        for count in (size - 1, 1000):
            parts = [inputs(count, dtype, r, seed=7) for r in range(size)]
            for op, name in (("sum", "rd"), ("avg", "rd"), ("adasum", "rd"), ("adasum", "xring")):
                if dtype == torch.int32 and op != "sum":
                    continue
                tree = _tree(name, topology) if op == "adasum" else None
                answer = expected(parts[rank], op, tree)
                truth = torch.stack([part.double() for part in parts]).sum(0)
                if op == "avg":
                    truth /= size
                if op == "adasum":
                    truth = _truth(tree, parts)
                where = f"{dtype} {count} {op} {name}"
                # Nothing is rounded but to the dtype itself; then a tenth is added to one element
                # on rank 0, which is 0.1 of values near 1.4 and no rounding of 8 bits or more.
                good = truth.to(dtype)
                if wrong := count_wrong(good, answer):
                    faults.append(f"{where}: {wrong} of the true answer are wrong")
                bad = good.clone()
                if rank == 0:
                    bad[-1] += 1
                if count_wrong(bad, answer) != 1:
                    faults.append(f"{where}: one wrong element is not found")
                if dtype.is_floating_point:
                    bad[-1] = torch.nan
                    if count_wrong(bad, answer) != size:
                        faults.append(f"{where}: NaN is not found on every rank")
    parts = [inputs(4096, torch.float32, r, seed=1) for r in range(size)]
    in_line = expected(parts[rank], "adasum", _tree("xring", topology))
    balanced = _truth(_tree("vhdd", topology), parts).float()
    # Another order of the ranks is another answer, in nearly every element.
    if count_wrong(balanced, in_line) < 4096 * size * 0.9:
        faults.append("the wrong tree is not found")
    dist.destroy_process_group()
    return faults


def test_answers_are_true_and_wrong_elements_are_counted() -> None:
    for faults in run_ranks(4, _answers, 4):
        assert not faults, "\n".join(faults)


def _main(rank: int, arguments: list[str], environment: dict[str, str]) -> int:
    os.environ.update(environment)
    return all_reduce.main(arguments)


def _bench(size: int, path: Path, arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON of a run on so many ranks."""
    command = [*arguments.split(), "-J", str(path)]
    codes = run_ranks(size, _main, command, environment)
    assert codes == [0] * size
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_a_run(tmp_path: Path) -> None:
    arguments = "-b 1 -e 4K -f 64 -n 3 -w 1 -c 2 -d half -o avg,adasum -a rd,xring,psgpu#2:64:rechd"
    result = _bench(3, tmp_path / "out.json", arguments)
    rows = result["results"]
    names = ["torch", "rd", "xring", "psgpu#2:64:rechd"]
    assert [row["algorithm"] for row in rows] == names * 6
    assert [row["size"] for row in rows[::4]] == [0, 0, 64, 64, 4096, 4096]
    assert {(row["redop"], row["algorithm"] == "torch") for row in rows} == {
        ("avg", True),
        ("avg", False),
        ("adasum", False),
        ("sum", True),
    }
    assert all(row["wrong"] == 0 and row["type"] == "float16" for row in rows)
    assert all(row["time_low"] <= row["time"] <= row["time_high"] for row in rows)
    for row in rows:
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 2 / 3)
    facts = result["environment"]
    assert (facts["ranks"], facts["torch"]) == (3, torch.__version__)
    assert result["arguments"]["iters"] == 3


@pytest.mark.slow
def test_command_under_torchrun_prints_the_table() -> None:
    # Rank 0 alone: torch 2.10's gloo prints, too, and lines of several ranks can be one.
    launch = "torch.distributed.run --standalone --nproc-per-node 2 --local-ranks-filter 0"
    bench = "bench.collectives.all_reduce -b 64 -e 64 -n 2 -w 0 -a rd"
    run = subprocess.run(
        [sys.executable, "-m", *launch.split(), "-m", *bench.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [text for text in run.stdout.splitlines() if text and not text.startswith("[Gloo]")]
    assert "ranks 2" in lines[0]
    assert lines[1].split()[:7] == ["#", "size", "count", "type", "redop", "algorithm", "time"]
    assert [text.split()[4] for text in lines[3:5]] == ["torch", "rd"]
    assert lines[5] == "# Wrong elements: 0 OK"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-d float8", "-d must be one of"),
        ("-o max", "-o must be of sum, avg, adasum"),
        ("-a bogus", "bogus"),
        ("-b 1M -e 1K", "-b must not be more than -e"),
        ("-b 1q", "'1Q' is not a positive integer"),
        ("-f 1", "-f must be at least 2"),
        ("-n 0", "-n at least 1"),
        ("-o avg -d int32", "-o avg needs a floating -d"),
        ("-J nowhere/out.json", "argument -J/--output_file: [Errno 2] No such file"),
        ("", "start with torchrun"),
    ],
)
def test_options_that_are_refused(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as caught:
        all_reduce.main(arguments.split())
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_what_a_group_cannot_run_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments, text in (
        ("-o adasum -a collective", "cannot do Adasum"),
        ("-a xring#3", "xring takes 1 to 2 shards"),
        ("--model -a collective", "'collective' is no schedule"),
        ("--model -a rd:1k:xring", "has 2 ranges"),
    ):
        command = [*arguments.split(), "--device", "cpu"]
        codes = collectives.run_threads(2, lambda _, command=command: all_reduce.main(command))
        assert codes == [2, 2]
        assert capsys.readouterr().err.count(text) == 1


def test_a_row() -> None:
    torchs = Row(1 << 20, 1 << 18, "float32", "sum", "torch", 4, [4e-3] * 3, None)
    row = Row(1 << 20, 1 << 18, "float32", "sum", "rd", 4, [3e-3, 1e-3, 2e-3], 5)
    assert row.median == 2e-3
    assert row.algbw == pytest.approx((1 << 20) / 2e-3)
    assert row.busbw == pytest.approx(row.algbw * 1.5)
    figures = "1048576 262144 float32 sum rd 2000.0 1500.0-2500.0 0.52 0.79 5 2.00"
    assert " ".join(line(row, torchs, 9).split()) == figures
    assert line(torchs, torchs, 9).split()[-1] == "N/A"
    assert all(len(text) <= len(line(row, torchs, 9)) for text in header(9))


def test_the_rule_for_the_order() -> None:
    quick, slow, broad = [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [1.0, 1.1, 2.5]

    def verdict(first: list[float], second: list[float], *predicted: tuple[float, float]) -> str:
        one, other = ([*values] for values in zip(*predicted, strict=True))
        found = Comparison("sum", 8, {"a": first, "b": second}, {"a": one, "b": other})
        ((_, _, answer),) = found.pairs()
        return answer

    assert verdict(quick, slow, (1.0, 2.0), (1.0, 1.1)) == "right"
    assert verdict(quick, slow, (2.0, 1.0)) == "wrong"
    assert verdict(slow, quick, (1.0, 2.0)) == "wrong"
    assert verdict(slow, quick, (2.0, 1.0)) == "right"
    assert verdict(quick, slow, (1.0, 2.0), (2.0, 1.0)) == "undecided"
    assert verdict(quick, broad, (2.0, 1.0)) == "undecided"
    assert verdict(quick, slow, (1.0, 1.0), (2.0, 2.0)) == "same steps"


def test_the_rule_for_the_times() -> None:
    found = Comparison("sum", 8, {"a": [1.0, 1.0, 1.0]}, {"a": [2.1, 4.0]})
    assert not found.near("a")
    assert found.ratio("a") == pytest.approx(3.05)
    assert Comparison("sum", 8, {"a": [1.0, 1.0, 1.0]}, {"a": [2.0, 4.0]}).near("a")
    assert Comparison("sum", 8, {"a": [1.0, 1.0, 1.0]}, {"a": [0.5, 0.1]}).near("a")
    assert not Comparison("sum", 8, {"a": [1.0, 1.0, 1.0]}, {"a": [0.4]}).near("a")
    wrong = Comparison("sum", 8, {"a": [1.0], "b": [2.0]}, {"a": [2.0], "b": [1.0]})
    text = "\n".join(report([found, wrong]))
    assert "0 right, 1 wrong, 0 undecided, 0 same steps" in text
    assert "2 of 3 within 2x" in text and "Wrong: sum at 8 bytes, a and b." in text


def _disagreements(found: dict[str, Any]) -> tuple[set[tuple[Any, ...]], int]:
    """Where the model is wrong in a run, and how many pairs it decided at all."""
    wrong: set[tuple[Any, ...]] = set()
    decided = 0
    for each in found["model"]:
        where = each["op"], each["size"]
        for a, b, verdict in each["pairs"]:
            decided += verdict in ("right", "wrong")
            if verdict == "wrong":
                wrong.add((*where, "order", a, b))
        wrong |= {(*where, "time", name) for name, near in each["near"].items() if not near}
    return wrong, decided


@pytest.mark.timing
@pytest.mark.parametrize("size", [2, 4])
def test_the_model_agrees_with_gloo(size: int, tmp_path: Path) -> None:
    """By the rule of all_reduce_model; a disagreement counts if a second run repeats it."""
    arguments = "--model -b 4K -e 16M -f 16 -n 8 -w 1 -c 0 -o sum,adasum"
    wrong, decided = _disagreements(
        _bench(size, tmp_path / "1.json", arguments, ADASUM_TRANSPORT="gloo")
    )
    if wrong:
        again, more = _disagreements(
            _bench(size, tmp_path / "2.json", arguments, ADASUM_TRANSPORT="gloo")
        )
        wrong &= again
        decided += more
    assert not wrong, sorted(wrong)
    if not decided:
        pytest.skip("nothing shown: on this machine, now, no two algorithms differ by their spread")
