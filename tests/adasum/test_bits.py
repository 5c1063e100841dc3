"""What the bits of a training depend on, as it says itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adasum as hvd
import collectives
from adasum.bits import bits_of, torch_facts
from adasum.bits.__main__ import main
from collectives import Group
from tests.processes.harness import run_ranks, script

PAGE = Path(__file__).parents[2] / "docs" / "bits.md"


def saved(path: Path, size: int, **options: Any) -> dict[str, dict[str, str]]:
    def job(group: Group) -> dict[str, dict[str, str]]:
        model = nn.Linear(2, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        return bits_of(hvd.DistributedOptimizer(plain, model.named_parameters(), **options))

    ranks = collectives.run_threads(size, job)
    # Threads of one process share torch's, run_threads divides them by the ranks.
    ranks[0]["torch"] = torch_facts()
    path.write_text(json.dumps(ranks[0]))
    return ranks[0]


def test_run_in_order_depends_on_its_leaves_alone(tmp_path: Path) -> None:
    options: Any = {"order": "tree", "op": hvd.Sum}
    first = saved(tmp_path / "a", 4, backward_passes_per_step=2, **options)
    second = saved(tmp_path / "b", 2, backward_passes_per_step=4, **options)
    assert first["reduction"] == second["reduction"]
    assert first["reduction"]["order"].startswith("tree of 8 leaves, (((0·1)·(2·3))·((4·5)")
    other = saved(tmp_path / "c", 2, **options)
    assert other["reduction"] != first["reduction"]


def test_run_without_an_order_depends_on_ranks_and_algorithm(tmp_path: Path) -> None:
    found = saved(tmp_path / "a", 2, algorithm="rd")["reduction"]
    assert found["ranks × passes"] == "2 × 1"
    assert (found["algorithm"], found["compression"], found["method"]) == ("rd", "none", "gradient")
    assert "depend on ranks" in found["order"]


def test_command_says_what_differs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bits = saved(tmp_path / "a", 2, order="tree", accumulate=torch.float32)
    assert main([str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "tree of 2 leaves, (0·1)" in said and "HERE" not in said
    assert "torch.float32" in said
    bits["torch"]["threads"] = "77"
    (tmp_path / "b").write_text(json.dumps(bits))
    assert main([str(tmp_path / "b")]) == 1
    assert "77      HERE: " in capsys.readouterr().out


def test_what_is_no_such_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("{}")
    (tmp_path / "b").write_text("nothing")
    none = "cannot read"
    for name, text in (("a", "is not what bits_of returned"), ("b", none), ("c", none)):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / name)])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    with pytest.raises(TypeError, match="optimizer must be a DistributedOptimizer"):
        bits_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


def test_script_of_the_guide_prints_one_number_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    printed = [said for size in (1, 2, 4) for said in run_ranks(size, script, str(path))]
    numbers = [said.splitlines()[-1] for said in printed]
    assert re.fullmatch(r"-?\d+\.\d{6,}", numbers[0])
    assert numbers == numbers[:1] * 7
