"""Where a recorder's rows and alarms go."""

from __future__ import annotations

import csv
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from adasum import GradientRecorder
from adasum.gradient_recorder import Alarm, RecordedStep, Row, TensorBoardSink, WandbSink
from adasum.gradient_recorder.statistics import ALL
from collectives import Group, run_threads
from tests.adasum.gradient_recorder.small import train


def test_table_is_written_as_csv_and_by_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: Group) -> GradientRecorder:
        recorder = GradientRecorder()
        train(group, recorder, 2)
        return recorder

    recorder = run_threads(3, run)[0]
    recorder.to_csv(tmp_path / "rows.csv")
    columns, *lines = csv.reader((tmp_path / "rows.csv").open())
    assert columns == [
        *("step", "name", "orthogonality", "noise_scale"),
        *("norm_0", "norm_1", "norm_2", "agreement_0", "agreement_1", "agreement_2"),
    ]
    row = recorder.rows[7]
    assert lines[7] == [
        *map(str, row[:2]),
        *map(str, (row.orthogonality, row.noise_scale, *row.norms, *row.agreements)),
    ]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        recorder.to_pandas()
    frame = types.SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", frame)
    rows, names = recorder.to_pandas()
    assert names == columns and list(map(str, rows[7])) == lines[7]


def a_step() -> RecordedStep:
    row = Row(3, "fc", (1.0, 2.0), (0.5, 0.25), 0.75, 8.0)
    return RecordedStep(3, [row], [Alarm(3, "zero", (1,), ("fc",), 0.0)])


def test_tensorboard_and_wandb_get_every_number_and_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Any, ...]] = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *each: said.append(each), add_text=lambda *each: said.append(each)
    )
    TensorBoardSink(writer)(a_step())
    logged: dict[str, float] = {}
    alerts: list[dict[str, str]] = []
    run = types.SimpleNamespace(log=logged.update, alert=lambda **each: alerts.append(each))
    WandbSink(run)(a_step())
    numbers = {
        "gradients/fc/orthogonality": 0.75,
        "gradients/fc/noise scale": 8.0,
        "gradients/fc/norm of rank 0": 1.0,
        "gradients/fc/norm of rank 1": 2.0,
        "gradients/fc/agreement of rank 0": 0.5,
        "gradients/fc/agreement of rank 1": 0.25,
    }
    assert sorted(said[:-1]) == sorted((name, value, 3) for name, value in numbers.items())
    assert logged == {**numbers, "gradients/step": 3}
    assert said[-1] == ("gradients/alarms", str(a_step().alarms[0]), 3)
    assert alerts == [{"title": "adasum: zero", "text": str(a_step().alarms[0])}]
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoardSink("runs")
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbSink()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    with pytest.raises(RuntimeError, match=r"wandb.init\(\) first"):
        WandbSink()


def test_plot_has_a_line_a_rank_and_marks_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def run(group: Group) -> GradientRecorder:
        recorder = GradientRecorder()
        train(group, recorder, 30, (lambda g: 100 * g) if group.rank == 1 else lambda g: g)
        return recorder

    recorder = run_threads(3, run)[0]
    norms, agreements, noise = recorder.plot().axes
    (alarm, *_) = (alarm for alarm in recorder.alarms if ALL in alarm.names)
    # Three ranks and the alarm's line.
    assert [len(axes.lines) for axes in (norms, agreements, noise)] == [4, 4, 2]
    assert norms.lines[3].get_xdata() == [alarm.step] * 2
    assert [text.get_text() for text in norms.texts] == [" scaled: 1"]
    assert norms.lines[1].get_ydata()[0] == recorder.rows[0].norms[1]
    with pytest.raises(ValueError, match="'fc'"):
        recorder.plot("fc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        recorder.plot("0.bias")
