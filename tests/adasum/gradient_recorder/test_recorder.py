"""The recorder on real reductions: its numbers, its memory, and what it is told."""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import adasum
from adasum import GradientRecorder
from adasum.gradient_recorder import Alarm, Row
from adasum.gradient_recorder.recorder import _Reduction
from adasum.gradient_recorder.statistics import ALL, NoiseScale, StepGrams
from adasum.observer import GramObserver
from collectives import Group, run_threads
from tests.adasum.definition import tree
from tests.adasum.gradient_recorder.small import NAMES, train


def expected(vectors: Sequence[Tensor], name: str, step: int) -> Row:
    """The row of some ranks' gradients, from the definitions; no noise scale."""
    norms = [vector.norm().item() for vector in vectors]
    unit = torch.stack([vector / vector.norm() for vector in vectors])
    agreements = []
    for rank in range(len(vectors)):
        others = sorted((unit @ unit[rank])[[r for r in range(len(vectors)) if r != rank]].tolist())
        agreements.append(others[len(others) // 2])
    total = sum(norm**2 for norm in norms)
    return Row(
        step, name, tuple(norms), tuple(agreements), tree(vectors).norm().item() ** 2 / total, 0
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_have_what_float64_arithmetic_has_on_every_rank(size: int) -> None:
    def run(group: Group) -> tuple[list[Row], list[list[Tensor]]]:
        recorder = GradientRecorder()
        assert isinstance(recorder, GramObserver)
        sent = train(group, recorder, 3)
        return recorder.rows, sent

    results = run_threads(size, run)
    assert results[0][0][0][:2] == (0, ALL)
    for rows, _ in results:
        assert rows == results[0][0] and len(rows) == 15
        for row in rows:
            columns = [sent[row.step] for *_, sent in results]
            if row.name == ALL:
                # Adasum is each layer's, so its result is not that of the whole.
                wanted = expected([torch.cat(column) for column in columns], ALL, row.step)
                layers = [tree([c[i] for c in columns]).square().sum().item() for i in range(4)]
                total = sum(norm**2 for norm in wanted.norms)
                wanted = wanted._replace(orthogonality=sum(layers) / total)
            else:
                i = NAMES.index(row.name)
                wanted = expected([column[i] for column in columns], row.name, row.step)
            assert row[:2] == wanted[:2]
            # Gradients are float32.
            for mine, yours in zip(row[2:4], wanted[2:4], strict=True):
                assert mine == pytest.approx(yours, rel=1e-5, abs=1e-5)
            assert row.orthogonality == pytest.approx(wanted.orthogonality, rel=1e-5)


def test_noise_scale_is_mccandlishs_of_drawn_gradients() -> None:
    """Of G and noise with a known covariance: tr S / |G|^2, to the deviation of 4,000 steps."""
    rng, scale = np.random.default_rng(0), NoiseScale()
    n, dimension, deviation = 4, 20, 0.5
    true = rng.standard_normal(dimension)
    signals, noises = [], []
    for step in range(1000):
        vectors = true + deviation * rng.standard_normal((1, n, dimension))
        products = vectors @ vectors.transpose(0, 2, 1)
        grams = StepGrams.of(step, ["a"], products, np.ones(1), np.ones(1, dtype=bool))
        signal, noise = grams.noise()
        last = scale.add(np.arange(2), (signal, noise))
        signals.append(signal[1])
        noises.append(noise[1])
    # tr S: a sum of (n - 1) d squares a step; |G|^2: its deviation a step is about 2 |G| sigma.
    trace = dimension * deviation**2
    spread = math.sqrt(2 / ((n - 1) * dimension * 1000))
    assert np.mean(noises) == pytest.approx(trace, rel=5 * spread)
    length = float(true @ true)
    assert np.mean(signals) == pytest.approx(
        length, abs=5 * 2 * math.sqrt(length / n / 1000) * deviation
    )
    # The running one has ten steps or so.
    assert last[1] == pytest.approx(trace / length, rel=0.5)
    unknown = StepGrams.of(0, ["a"], products * math.nan, np.ones(1), np.zeros(1, dtype=bool))
    assert np.isnan(scale.add(np.arange(2), unknown.noise())).all()


def test_without_gram_matrices_norms_alone_are_known() -> None:
    def scaled(gradient: Tensor) -> Tensor:
        return 100 * gradient

    def run(group: Group) -> tuple[list[Row], list[Alarm], list[list[Tensor]]]:
        recorder = GradientRecorder()
        changes = {"change": scaled} if group.rank == 2 else {}
        sent = train(group, recorder, 24, op=adasum.Average, **changes)
        return recorder.rows, recorder.alarms, sent

    results = run_threads(4, run)
    for rows, alarms, _ in results:
        assert repr(rows) == repr(results[0][0])
        assert {(alarm.kind, alarm.ranks) for alarm in alarms} == {("scaled", (2,))}
        for row in rows:
            assert all(map(math.isnan, (*row.agreements, row.noise_scale)))
            if row.name == "0.bias":
                wanted = [sent[row.step][1].norm().item() for *_, sent in results]
                assert row.norms == pytest.approx(wanted, rel=1e-5)


def test_one_rank_has_rows_and_no_alarm() -> None:
    def run(group: Group) -> tuple[int, list[Alarm]]:
        recorder = GradientRecorder(group=group)
        token = recorder.before_reduction(["a"], [torch.ones(3)])
        recorder.after_reduction(token, [torch.ones(3)])
        return len(recorder.rows), recorder.alarms

    assert run_threads(1, run) == [(2, [])]


def test_every_kth_step_is_recorded_and_the_last_rows_are_kept() -> None:
    def run(group: Group) -> tuple[list[int], list[int], int]:
        recorder = GradientRecorder(every=3, max_rows=12)
        train(group, recorder, 10)
        steps = [row.step for row in recorder.rows]
        recorder.clear()
        left = len(recorder.rows)
        train(group, recorder, 3)
        return steps, [row.step for row in recorder.rows], left

    for steps, later, left in run_threads(2, run):
        # Of steps 0, 3, 6 and 9, five rows each.
        assert steps == [3] * 2 + [6] * 5 + [9] * 5
        assert left == 0 and set(later) == {12}


def test_callback_gets_each_step_when_its_last_tensor_is_reduced() -> None:
    def run(group: Group) -> list[tuple[int, int, int]]:
        seen: list[tuple[int, int, int]] = []
        recorder = GradientRecorder(
            on_step=lambda record: seen.append((record.step, len(record.rows), len(recorder.rows)))
        )
        train(group, recorder, 4)
        # A tensor that had never come before.
        gram = adasum.observer.ObservedGram(
            torch.ones(1, 2, 2, dtype=torch.float64),
            torch.full((1, 2), 0.5, dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
            ((0, 1, 1, 1),),
        )
        recorder.after_gram(["late"], gram)
        train(group, recorder, 1)
        return seen

    for seen in run_threads(2, run):
        # The late tensor is of step 3, which was looked at; step 4 waits for another one.
        assert [step for step, *_ in seen] == [0, 1, 2, 3, 3]
        assert [rows for _, rows, _ in seen] == [5, 5, 5, 5, 2]
        assert [total for *_, total in seen] == [5, 10, 15, 20, 22]


def test_of_a_gpu_a_step_is_looked_at_when_the_next_one_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers that are on their way are waited for then, or when they are read."""
    waited: list[int] = []
    make = _Reduction.of

    def sent(*arguments: Any) -> _Reduction:
        arrival = types.SimpleNamespace(synchronize=lambda: waited.append(1))
        return make(*arguments)._replace(arrival=arrival)

    monkeypatch.setattr(_Reduction, "of", sent)

    def run(group: Group) -> tuple[list[int], list[int]]:
        seen: list[int] = []
        recorder = GradientRecorder(on_step=lambda record: seen.append(record.step))
        train(group, recorder, 4)
        before = [*seen]
        assert len(recorder.rows) == 20
        return before, seen

    assert run_threads(2, run) == [([0, 1, 2], [0, 1, 2, 3])] * 2
    # Two ranks, four steps, two buckets.
    assert len(waited) == 16


def test_an_alarm_is_logged_by_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    def run(group: Group) -> list[Alarm]:
        recorder = GradientRecorder()
        changes = {"change": torch.zeros_like} if group.rank == 1 else {}
        train(group, recorder, 40, **changes)
        return recorder.alarms

    with caplog.at_level(logging.WARNING, "adasum.gradient_recorder"):
        results = run_threads(2, run)
    assert results[0] == results[1]
    assert caplog.messages == list(map(str, results[0]))
    assert results[0][0][1:4] == ("zero", (1,), (ALL,))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"max_rows": True}, TypeError, "max_rows must be an int"),
        ({"factor": 1.0}, ValueError, "factor must be a number above 1"),
        ({"factor": math.nan}, ValueError, "factor must be a number above 1"),
        ({"group": 3}, TypeError, "group must be a collectives.Group"),
        ({"on_step": 1}, TypeError, "on_step must be a function"),
    ],
)
def test_bad_arguments_raise(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GradientRecorder(**arguments)
