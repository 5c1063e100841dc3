"""The benches of ranks: their answers and figures, and the cost model held to measured times."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kernels
from bench.collectives import node, one_gpu, optimizer_step
from bench.collectives.answer import Average, _ranks_behind, count_wrong, expected, inputs, tree_of
from bench.collectives.cost_model import Comparison
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from tests.processes.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def _tree(text: str, size: int) -> Any:
    return tree_of(*parse_all_reduce_spec(text), Topology(size, size))


def _truth(tree: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, int):
        return parts[tree].double()
    if isinstance(tree, Average):
        return torch.stack([parts[rank].double() for rank in tree.ranks]).mean(0)
    p, q = map(_ranks_behind, tree)
    return kernels.adasum_reference(*(_truth(side, parts) for side in tree), weights=(p, q))


def _answers(rank: int, size: int) -> list[str]:
    """What is wrong with the answers and the counts, as one rank sees it."""
    dist.init_process_group("gloo")
    faults = []
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    cases = [(torch.int32, "sum", "rd")]
    cases += [
        (dtype, *each)
        for dtype in floats
        for each in (("sum", "rd"), ("avg", "rd"), ("adasum", "rd"), ("adasum", "xring"))
    ]
    for dtype, op, name in cases:
        for count in (size - 1, 1000):
            parts = [inputs(count, dtype, r, seed=7) for r in range(size)]
            tree = _tree(name, size)
            answer = expected(parts[rank], op, tree)
            truth = torch.stack([part.double() for part in parts]).sum(0)
            truth = {"sum": truth, "avg": truth / size}.get(op, truth)
            if op == "adasum":
                truth = _truth(tree, parts)
            # Nothing is rounded but to the dtype itself; then one is added to one element on rank
            # 0, whose values near 1.4 no rounding of 8 bits or more moves so far.
            good = truth.to(dtype)
            bad = good.clone()
            bad[-1] += rank == 0
            found = [count_wrong(good, answer), count_wrong(bad, answer)]
            if dtype.is_floating_point:
                bad[-1] = torch.nan
            else:
                bad[-1] += rank != 0
            if [*found, count_wrong(bad, answer)] != [0, 1, size]:
                faults.append(f"{dtype} {count} {op} {name}: {found} of right, of one wrong")
    parts = [inputs(4096, torch.float32, r, seed=1) for r in range(size)]
    in_line = expected(parts[rank], "adasum", _tree("xring", size))
    balanced = _truth(_tree("vhdd", size), parts).float()
    # Another order of the ranks is another answer, in nearly every element.
    if count_wrong(balanced, in_line) < 4096 * size * 0.9:
        faults.append("the wrong tree is not found")
    dist.destroy_process_group()
    return faults


def test_answers_are_true_and_wrong_elements_are_counted() -> None:
    for faults in run_ranks(4, _answers, 4):
        assert not faults, "\n".join(faults)


def _printed(rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> str:
    """What a bench prints on one rank, once it has ended well."""
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    with redirect_stdout(io.StringIO()) as said:
        assert not importlib.import_module(f"bench.collectives.{module}").main()
    return said.getvalue()


def _bench(module: str, size: int, path: Path, arguments: str, **environment: str) -> Any:
    """The JSON of a run on so many ranks."""
    run_ranks(size, _printed, module, [*arguments.split(), "-J", str(path)], environment)
    return json.loads(path.read_text())


def test_rows_of_a_run_are_right_and_have_their_figures(tmp_path: Path) -> None:
    arguments = "-b 1 -e 4K -f 64 -n 3 -w 1 -d half -o avg,adasum -a rd,psgpu#2:64:rechd"
    rows = _bench("all_reduce", 3, tmp_path / "out.json", arguments)["results"]
    assert [row["algorithm"] for row in rows] == ["torch", "rd", "psgpu#2:64:rechd"] * 6
    assert [row["size"] for row in rows[::3]] == [0, 0, 64, 64, 4096, 4096]
    # Adasum stands beside torch's sum.
    assert [row["redop"] for row in rows] == [*["avg"] * 3, "sum", *["adasum"] * 2] * 3
    for row in rows:
        assert row["wrong"] == 0 and row["time_low"] <= row["time"] <= row["time_high"]
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 2 / 3)


@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_every_way_to_reduce_gradients_is_right(tmp_path: Path, op: str) -> None:
    arguments = f"--models lenet --op {op} -n 3"
    rows = _bench("gradients", 2, tmp_path / "out.json", arguments)["rows"]
    assert len(rows) == 6 and rows[0]["speedup"] == 1.0
    assert all(row["right"] and row["ms"] > 0 and row["bytes"] == 4 * 6058 for row in rows)


def test_requests_and_overlap_have_their_figures(tmp_path: Path) -> None:
    arguments = "--blocks 2 --seconds 0.001"
    assert len(_bench("requests", 2, tmp_path / "out.json", arguments)) == 8
    for options in ("", "--op adasum --in-backward"):
        small = f"--layers 2 --width 8 --batch 4 -n 2 {options}"
        assert "hidden" in _bench("overlap", 2, tmp_path / "out.json", small)


def test_elements_that_are_wrong_on_one_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right, world = node.expected, ThreadWorld(2)

    def off(terms: list[torch.Tensor], adasum: bool) -> torch.Tensor:
        want = right(terms, adasum)
        want[5] += 1e-3 * adasum
        return want

    monkeypatch.setattr(node, "expected", off)
    device = torch.device("cpu")
    summed, adasum = one_gpu.run(2, 1001, 3, device, world.transport, ["rechd", "vhdd"])
    assert (summed.wrong, adasum.wrong) == (0, 2)
    assert len(adasum.seconds) == 3 and min(summed.seconds) > 0


@pytest.mark.slow
def test_steps_of_two_trees_have_a_ratio_and_its_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optimizer_step._interval([*map(float, range(1, 16))]) == (4.0, 12.0)
    options = ["--model", "ResNet-50", "--steps", "1", "--rounds", "1", "--against", str(ROOT)]
    assert optimizer_step.main(options) == 0
    assert capsys.readouterr().out.count("ratio") == 3


_QUICK, _SLOW, _BROAD = [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [1.0, 1.1, 2.5]


@pytest.mark.parametrize(
    ("first", "second", "predicted", "verdict"),
    [
        (_QUICK, _SLOW, ([1.0, 1.0], [2.0, 1.1]), "right"),
        (_QUICK, _SLOW, ([2.0], [1.0]), "wrong"),
        (_SLOW, _QUICK, ([1.0], [2.0]), "wrong"),
        (_SLOW, _QUICK, ([2.0], [1.0]), "right"),
        (_QUICK, _SLOW, ([1.0, 2.0], [2.0, 1.0]), "undecided"),
        (_QUICK, _BROAD, ([2.0], [1.0]), "undecided"),
        (_QUICK, _SLOW, ([1.0, 2.0], [1.0, 2.0]), "same steps"),
    ],
)
def test_the_rule_for_the_order(first: Any, second: Any, predicted: Any, verdict: str) -> None:
    samples, models = {"a": first, "b": second}, dict(zip("ab", predicted, strict=True))
    assert Comparison("sum", 8, samples, models).pairs() == [("a", "b", verdict)]
