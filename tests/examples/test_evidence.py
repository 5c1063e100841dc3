"""The code behind docs/evidence/protocol.md: stages, resuming, checking, data."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import sys
import zlib
from pathlib import Path

import pytest
import torch

from tests.processes.commands import ROOT, ran


@pytest.fixture
def small(load, monkeypatch):
    """The digits' protocol with trainings of 96 batches of two images and two seeds."""
    tasks = load("evidence.tasks")
    whole = tasks.TASKS["digits"]()
    # The same batches, of fewer images.
    task = dataclasses.replace(whole, batches=96, looks=2, seeds=(0, 1), ranks=(2, 3, 8, 32))
    monkeypatch.setitem(tasks.TASKS, "digits", lambda: task)
    return task


@pytest.fixture
def pretended(load, small, monkeypatch):
    """`train` is a function of the cell that trains nothing, and lists what it was asked for."""
    runner, asked = load("evidence.runner"), []

    def train(cell):
        asked.append(cell.name)
        value = zlib.crc32(cell.name.encode()) / 2**32
        result = {
            "cell": dataclasses.asdict(cell),
            "steps": 96 // cell.ranks,
            "diverged": False,
            "looks": [[48, value / 2, 2 - value], [96, value, 1 - value]],
            "validation": [value, 1 - value],
            "test": [value, 1 - value] if cell.test else None,
            "seconds_a_batch": 0.001,
            "seconds": 0.5,
        }
        if not cell.method.startswith("adasum"):
            result["noise"] = [[4.0, 0.5], [8.0, 1.5]]
        if cell.method.startswith("adasum") and cell.ranks == 8 and cell.test:
            result["ratios"] = [[0.5] * 8] * 2
        return result

    monkeypatch.setattr(runner, "train", train)
    return asked


def stored(folder: Path) -> dict[str, dict]:
    """Return the digits' results by name, from the file itself."""
    lines = (folder / "digits.jsonl").read_text().splitlines()
    return {name_of(json.loads(line)): json.loads(line) for line in lines}


def name_of(result: dict) -> str:
    return importlib.import_module("evidence.store").cell_of(result).name


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--tasks", "digits", "--workers", "1", "--folder", str(folder), *more]


def test_protocol_counts_the_same_cells_whatever_the_results(load, small):
    protocol = load("evidence.protocol")
    want = {stage: len(cells) for stage, cells in protocol.count("digits").items()}
    for salt in ("a", "b"):

        def result(cell, salt=salt):
            return {"validation": [zlib.crc32((salt + cell.name).encode()), 0.0]}

        got: dict[str, int] = {}
        for stage, cells in protocol.stages("digits", result):
            got[stage] = got.get(stage, 0) + len(set(cells))
            assert len({cell.name for cell in cells}) == len(set(cells))
        assert got == want


def test_best_four_have_an_average_and_an_adasum(load, small):
    protocol = load("evidence.protocol")
    bad = {"average": 0.1, "adasum": 0.2}

    def result(cell):
        return {"validation": [bad.get(cell.method.split("-")[0], 0.9), 0.0]}

    best = protocol.Choices("digits", result).best()
    assert len(best) == len(set(best)) == 4
    assert {method.split("-")[0] for method in best[:2]} == {"average", "adasum"}


def test_evidence_resumes_after_an_interruption_and_writes_all(
    load, pretended, tmp_path, monkeypatch
):
    main, plots, runner = load("evidence.__main__"), load("evidence.plots"), load("evidence.runner")
    once = runner.train

    def interrupted(cell):
        if len(pretended) == 40:
            raise KeyboardInterrupt
        return once(cell)

    runner.train = interrupted
    with pytest.raises(KeyboardInterrupt):
        main.main(arguments(tmp_path))
    runner.train = once
    assert len(stored(tmp_path)) == 40
    # As if the interruption had come while a line was written.
    with (tmp_path / "digits.jsonl").open("a") as file:
        file.write('{"cell": {"task": "dig')

    assert main.main(arguments(tmp_path)) == 0
    assert len(pretended) == len(set(pretended))
    assert sorted(stored(tmp_path)) == sorted(pretended)
    assert len((tmp_path / "digits.jsonl").read_text().splitlines()) == len(pretended)
    text = (tmp_path / "digits.md").read_text()
    assert "Not run yet" not in text
    assert text.count("## ") == 13
    # A variance of 6 beside a squared gradient of 1: 48 of 8 examples.
    assert "| 3 | 24 | 48 |  |" in text
    assert "| 8 | 64 | 48 | yes |" in text
    for name in ("curves", "ranks", "rates", "layers"):
        assert (tmp_path / f"digits_{name}.png").stat().st_size > 5000
    assert plots.WIDTH * plots.DPI < 1000

    before = len(pretended)
    monkeypatch.setattr(plots, "write", lambda results, folder: [])
    assert main.main(arguments(tmp_path)) == 0
    assert len(pretended) == before
    first = stored(tmp_path)[pretended[0]]
    assert first["made_by"]["torch"] == torch.__version__
    assert len(first["made_by"]["commit"].rstrip("+")) in (40, len("unknown"))


@pytest.mark.slow
def test_evidence_as_a_command_trains_in_processes_of_its_own(tmp_path):
    # The first two cells begin at once, whatever the minutes are.
    command = ("-m", "evidence", "--tasks", "digits", "--folder", tmp_path, "--minutes", "0.03")
    path = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    done = ran(sys.executable, *command, timeout=150, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "call it again to go on" in done.stderr
    assert len((tmp_path / "digits.jsonl").read_text().splitlines()) >= 2


def test_check_runs_a_cell_again_and_names_what_differs(load, small, tmp_path, capsys):
    main, store, cells = load("evidence.__main__"), load("evidence.store"), load("evidence.cells")
    cell = cells.Cell("digits", "adasum-delta", 8, 0.03125, 1, test=True)
    results = store.Store(tmp_path)
    results.save(cell, cells.train(cell))
    assert main.main(arguments(tmp_path, "--check", cell.name)) == 0
    assert "the same" in capsys.readouterr().out

    result = stored(tmp_path)[cell.name]
    assert store.cell_of(result) == cell
    assert len(result["ratios"]) == 2
    results.path_of("digits").write_text(json.dumps({**result, "test": [0.5, 1.0]}) + "\n")
    assert main.main(arguments(tmp_path, "--check", cell.name)) == 1
    assert "test: [0.5, 1.0] was stored" in capsys.readouterr().out
    assert main.main(arguments(tmp_path, "--check", "digits/nothing")) == 2


def test_training_that_diverges_stops_with_the_score_of_guessing(load, small):
    cells = load("evidence.cells")
    result = cells.train(cells.Cell("digits", "sum", 8, 1e30, 0, test=True))
    assert result["diverged"]
    assert result["steps"] < 96 // 8
    # Results have six digits.
    assert result["test"] == [0.1, pytest.approx(math.log(10), rel=5e-6)]
    assert result["validation"] == result["test"]
    json.dumps(result, allow_nan=False)


def test_local_steps_end_with_what_is_left_of_a_period(load, small):
    cells = load("evidence.cells")
    result = cells.train(cells.Cell("digits", "nesterov", 8, 0.03125, 0, local_steps=64))
    assert result["steps"] == 96 // 8
    assert result["looks"][-1][0] == 96 * small.batch


def test_batches_of_every_task_divide_by_every_number_of_ranks(load, monkeypatch):
    tasks, data = load("evidence.tasks"), load("evidence.data")

    def fashion(*sizes):
        return data.Parts(*((torch.zeros(n, 1, 28, 28), torch.zeros(n).long()) for n in sizes))

    # In place of what would be fetched.
    monkeypatch.setattr(data, "fashion", fashion)
    monkeypatch.setattr(data, "shakespeare", lambda: "To be, or not to be. " * 10_000)
    for make in (tasks.digits, tasks.fashion, tasks.finetune, tasks.text):
        task = make()
        assert [n for n in task.ranks if task.batches % n] == []
