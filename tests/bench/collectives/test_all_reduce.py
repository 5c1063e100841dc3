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
from bench.collectives import all_reduce, gradients, horovod_all_reduce, one_gpu, optimizer_step
from bench.collectives.answer import Average, count_wrong, expected, inputs, tree_of
from bench.collectives.cost_model import Comparison
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld
from tests.processes.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def _tree(text: str, topology: Topology) -> Any:
    (spec,) = parse_all_reduce_spec(text)
    return tree_of(spec, topology)


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


def test_rows_of_a_run_are_right_and_have_their_figures(tmp_path: Path) -> None:
    arguments = "-b 1 -e 4K -f 64 -n 3 -w 1 -d half -o avg,adasum -a rd,psgpu#2:64:rechd"
    result = _bench(3, tmp_path / "out.json", arguments)
    rows = result["results"]
    assert [row["algorithm"] for row in rows] == ["torch", "rd", "psgpu#2:64:rechd"] * 6
    assert [row["size"] for row in rows[::3]] == [0, 0, 64, 64, 4096, 4096]
    # Adasum stands beside torch's sum.
    assert [row["redop"] for row in rows] == [*["avg"] * 3, "sum", *["adasum"] * 2] * 3
    assert all(row["wrong"] == 0 for row in rows)
    for row in rows:
        assert row["time_low"] <= row["time"] <= row["time_high"]
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 2 / 3)


@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_every_way_to_reduce_gradients_is_right(tmp_path: Path, op: str) -> None:
    out = tmp_path / "out.json"
    command = ["--models", "lenet", "--op", op, "-n", "3", "-J", str(out)]
    assert run_ranks(2, _gradients, command) == [0, 0]
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and rows[0]["speedup"] == 1.0
    assert all(row["right"] and row["ms"] > 0 and row["bytes"] == 4 * 6058 for row in rows)


def _gradients(rank: int, command: list[str]) -> int:
    return gradients.main(command)


def test_elements_that_are_wrong_on_one_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right, world = one_gpu.expected, ThreadWorld(2)

    def off(terms: list[torch.Tensor], adasum: bool) -> torch.Tensor:
        want = right(terms, adasum)
        want[5] += 1e-3 * adasum
        return want

    monkeypatch.setattr(one_gpu, "expected", off)
    device = torch.device("cpu")
    summed, adasum = one_gpu.run(2, 1001, 3, device, world.transport, ["rechd", "vhdd"])
    assert (summed.wrong, adasum.wrong) == (0, 2)
    assert (summed.size, adasum.redop, len(adasum.seconds)) == (4004, "adasum", 3)
    assert min(summed.seconds) > 0


class _FakeHorovod(horovod_all_reduce.Horovod):
    """Horovod by torch's gloo, with the sum for Adasum."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size, self.transport = dist.get_rank(), dist.get_world_size(), self
        self.topology = Topology(self.size, self.size)

    def all_reduce(self, tensor: torch.Tensor, op: Any, *, algorithm: str) -> None:
        dist.all_reduce(tensor)


def _horovods_rank(rank: int, out: str) -> int:
    horovod_all_reduce.Horovod = _FakeHorovod  # type: ignore[misc]
    os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
    flags = "-b 4K -e 4K -n 2 -w 0 -o sum,adasum --device cpu -J"
    return horovod_all_reduce.main([*flags.split(), out])


def test_ranks_of_horovod_that_are_wrong_end_the_bench(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run_ranks(2, _horovods_rank, str(out)) == [1, 1]
    rows = json.loads(out.read_text())["results"]
    assert [row["wrong"] > 0 for row in rows] == [False, False, False, True]


def test_horovods_times_stand_beside_ours_by_turn() -> None:
    def turn(horovod: float, ours: float, torchs: float) -> dict[str, Any]:
        names = {"size": 4096, "redop": "sum"}
        pairs = {"horovod": (-1.0, horovod), "ours": (torchs, ours)}
        return {
            name: {"results": [{**names, "time": time} for time in times]}
            for name, times in pairs.items()
        }

    (line,) = horovod_all_reduce.lines([turn(40, 20, 5), turn(10, 20, 6), turn(30, 10, 9)])
    assert line.cells() == ["4096", "sum", "30.0", "20.0", "6.0", "1.50", "0.50-3.00"]


def _printed(rank: int, module: str, arguments: list[str]) -> str:
    sys.argv = [module, *arguments]
    with redirect_stdout(io.StringIO()) as said:
        importlib.import_module(f"bench.collectives.{module}").main()
    return said.getvalue()


def test_requests_and_overlap_print_their_figures() -> None:
    said = run_ranks(2, _printed, "requests", ["--blocks", "2", "--seconds", "0.001"])
    assert said[0].count(" us ") == 8
    small = ["--layers", "2", "--width", "8", "--batch", "4", "-n", "2"]
    for options in ([], ["--op", "adasum", "--in-backward"]):
        assert "\nhidden " in run_ranks(2, _printed, "overlap", [*small, *options])[0]


@pytest.mark.slow
def test_steps_of_two_trees_have_a_ratio_and_its_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optimizer_step._interval([*map(float, range(1, 16))]) == (4.0, 12.0)
    options = ["--model", "ResNet-50", "--steps", "1", "--rounds", "1", "--against", str(ROOT)]
    assert optimizer_step.main(options) == 0
    assert capsys.readouterr().out.count("ratio") == 3


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
