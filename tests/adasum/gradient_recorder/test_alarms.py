"""Which alarms are raised, how soon, and how seldom without a fault; vectors are drawn here."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from adasum.gradient_recorder import Alarm, alarms
from adasum.gradient_recorder.alarms import IN_A_ROW, Evidence, Kind, Watch, suspects
from adasum.gradient_recorder.statistics import ALL, StepGrams

Array = np.ndarray
Change = Callable[[Array, Array, np.random.Generator], Array]
LAYERS = ("a", "b")
FAULTY = 1
BEGIN = 20


def draw(rng: np.random.Generator, ranks: int, noise: float = 1.0) -> Array:
    """Two layers' gradients of all ranks: [2, ranks, 30], a common one and each batch's own noise.

    Batches differ in length, too, by half and more, as they do in a training.
    """
    common = rng.standard_normal((2, 1, 30))
    lengths = np.exp(0.4 * rng.standard_normal((1, ranks, 1)))
    return lengths * (common + noise * rng.standard_normal((2, ranks, 30)))


def grams_of(step: int, vectors: Array) -> StepGrams:
    products = vectors @ vectors.transpose(0, 2, 1)
    squares = np.square(vectors.mean(1)).sum(1)
    return StepGrams.of(step, LAYERS, products, squares, np.ones(2, dtype=bool))


def alarms_of(
    ranks: int, change: Change | None, steps: int = 120, noise: float = 1.0, factor: float = 2.0
) -> list[Alarm]:
    """Change the faulty rank from BEGIN on; `change` gets all, the first ones, and a generator."""
    rng, watch, found = np.random.default_rng(ranks), Watch(ranks, factor), []
    first = draw(rng, ranks, noise)
    for step in range(steps):
        vectors = draw(rng, ranks, noise)
        if change is not None and step >= BEGIN:
            vectors[:, FAULTY] = change(vectors, first, rng)
        found += watch.add(np.arange(3), grams_of(step, vectors))
    return found


# What is done to a rank's gradients, and what it is called on three ranks or more, and on two.
CHANGES: dict[str, tuple[Change, Kind, Kind | None]] = {
    "ten times": (lambda v, first, rng: 10 * v[:, FAULTY], "scaled", "scaled"),
    "a tenth": (lambda v, first, rng: v[:, FAULTY] / 10, "scaled", "scaled"),
    "copied": (lambda v, first, rng: v[:, 0], "duplicated", "duplicated"),
    "the first": (lambda v, first, rng: first[:, FAULTY], "stuck", "stuck"),
    "long noise": (lambda v, first, rng: 40 * rng.standard_normal((2, 30)), "wild", "scaled"),
    "short noise": (lambda v, first, rng: rng.standard_normal((2, 30)), "wild", None),
    "opposed": (lambda v, first, rng: -v[:, FAULTY], "flipped", None),
    "zero": (lambda v, first, rng: 0 * v[:, FAULTY], "zero", "zero"),
    "not a number": (lambda v, first, rng: math.nan * v[:, FAULTY], "wild", "wild"),
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2 + i % 2) for name in CHANGES for i in range(2)), ("short noise", 8), ("zero", 8)],
)
def test_a_faulty_rank_is_named_and_no_other(name: str, ranks: int) -> None:
    change, kind, of_two = CHANGES[name]
    kind = kind if ranks > 2 else of_two  # type: ignore[assignment]
    found = alarms_of(ranks, change)
    named = {"duplicated": (0, FAULTY)}.get(kind or "", (FAULTY,))
    if ranks == 2 and kind == "scaled":
        named = (0, 1)
    if kind is None:
        assert found == []
        return
    right = [alarm for alarm in found if alarm.kind == kind and ALL in alarm.names]
    if name == "not a number":
        assert [alarm.step for alarm in found] == [BEGIN]
        assert str(found[0]).endswith(f"the gradient of rank {FAULTY} is not finite")
    else:
        assert right and right[0].step >= BEGIN + IN_A_ROW - 1
    assert all(alarm.ranks == named for alarm in found), found


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_are_alike_raise_no_alarm(ranks: int) -> None:
    assert alarms_of(ranks, None, steps=200) == []


def test_a_factor_below_the_margin_raises_no_alarm() -> None:
    def half_more(vectors: Array, first: Array, rng: np.random.Generator) -> Array:
        return 1.5 * vectors[:, FAULTY]

    assert alarms_of(4, half_more, noise=0.1, steps=200) == []
    assert alarms_of(4, CHANGES["ten times"][0], noise=0.1, factor=30.0) == []


def test_false_alarms_are_as_rare_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chance that is bet against itself: at most T/A of the tests reach A in T steps."""
    monkeypatch.setattr(alarms, "FALSE_ALARMS", 1e-4)
    rng, steps = np.random.default_rng(0), 200
    for ranks in (2, 4, 8):
        layers = 2000 // ranks
        watched = Evidence(1, ranks)
        watched.grow(layers)
        chance = suspects(ranks) / ranks
        # Of this threshold, which all tests share, a single one: as if there were no other.
        monkeypatch.setattr(Evidence, "threshold", property(lambda _: 2000.0))
        ever = np.zeros((1, layers, ranks), dtype=bool)
        for _ in range(steps):
            watched.add(np.arange(layers), rng.random((1, layers, ranks)) < chance)
            ever |= watched.fired
        bound = steps / 2000
        # Five deviations of a mean of 2000 draws, which all may be as likely as the bound.
        assert 0 < ever.mean() <= bound + 5 * math.sqrt(bound / ever.size)


def test_an_alarm_ends_and_comes_again() -> None:
    rng, watch = np.random.default_rng(0), Watch(4, 2.0)
    said = []
    for step in range(400):
        vectors = draw(rng, 4, 0.1)
        if step // 100 % 2:
            vectors[:, 3] *= 100
        said += watch.add(np.arange(3), grams_of(step, vectors))
    assert [(alarm.kind, alarm.ranks) for alarm in said] == [("scaled", (3,))] * 2
    assert said[0].step < 200 and said[1].step > 300


def test_of_two_ranks_a_zero_now_and_then_does_not_repeat_what_was_said() -> None:
    rng, watch, found = np.random.default_rng(0), Watch(2, 2.0), []
    for step in range(120):
        vectors = draw(rng, 2, 0.1)
        vectors[:, FAULTY] *= 0 if step > 60 and step % 3 == 0 else 100
        found += watch.add(np.arange(3), grams_of(step, vectors))
    assert [(alarm.kind, alarm.ranks) for alarm in found] == [("scaled", (0, 1))]


def test_one_nan_on_one_rank_is_said_in_its_step() -> None:
    """The others' gradients are not finite either from the next step on, as in a training."""
    for ranks in (2, 3, 6):
        rng, watch, found = np.random.default_rng(0), Watch(ranks, 2.0), []
        for step in range(60):
            vectors = draw(rng, ranks)
            if step == 30:
                vectors[1, FAULTY, 7] = math.nan
            if step > 30:
                vectors[:] = math.nan
            found += watch.add(np.arange(3), grams_of(step, vectors))
        assert [alarm[:4] for alarm in found] == [(30, "wild", (FAULTY,), (ALL,))]


def test_a_fault_in_one_layer_names_that_layer() -> None:
    rng, watch, found = np.random.default_rng(0), Watch(4, 2.0), []
    for step in range(100):
        vectors = draw(rng, 4, 0.1)
        # So long that the whole gradient does not show the other layer.
        vectors[0] *= 1e3
        vectors[1, FAULTY] *= 4
        found += watch.add(np.arange(3), grams_of(step, vectors))
    assert [(alarm.kind, alarm.ranks, alarm.names) for alarm in found] == [
        ("scaled", (FAULTY,), ("b",))
    ]


def test_two_faulty_ranks_of_eight_are_both_named() -> None:
    rng, watch, found = np.random.default_rng(0), Watch(8, 2.0), []
    for step in range(100):
        vectors = draw(rng, 8)
        vectors[:, 2] *= 10
        vectors[:, 5] *= 7
        found += watch.add(np.arange(3), grams_of(step, vectors))
    assert {alarm.ranks for alarm in found} == {(2,), (5,)}


def test_a_faulty_one_of_three_makes_no_other_one_look_faulty() -> None:
    """Beside it and a clean one, the shorter clean one is the shortest of three, and far below."""
    found = alarms_of(3, CHANGES["ten times"][0], steps=500)
    assert {(alarm.kind, alarm.ranks) for alarm in found} == {("scaled", (FAULTY,))}


def test_ranks_with_the_same_gradient_make_no_other_one_look_wild() -> None:
    """Of which they have a cosine of 0.2, and of each other 1."""
    found = alarms_of(3, CHANGES["copied"][0], steps=150, noise=2.0)
    assert [(alarm.kind, alarm.ranks) for alarm in found] == [("duplicated", (0, FAULTY))]


def test_nothing_moves_on_any_rank_is_no_stuck_rank() -> None:
    """As at a rate of zero on the same data: five steps in a row, and all norms repeat."""
    rng, watch = np.random.default_rng(0), Watch(4, 2.0)
    vectors = draw(rng, 4)
    assert [a for s in range(10) for a in watch.add(np.arange(3), grams_of(s, vectors))] == []


def test_all_ranks_with_one_gradient_are_one_alarm() -> None:
    rng, watch, found = np.random.default_rng(0), Watch(4, 2.0), []
    for step in range(50):
        vectors = np.broadcast_to(draw(rng, 1), (2, 4, 30))
        found += watch.add(np.arange(3), grams_of(step, vectors))
    (alarm,) = found
    assert (alarm.kind, alarm.ranks, alarm.step) == ("duplicated", (0, 1, 2, 3), IN_A_ROW - 1)


def test_gradients_that_are_the_same_but_for_rounding_are_duplicated() -> None:
    """Of bfloat16 and in another order of additions: 2^-13 apart, and 2^-11 is another gradient."""
    for apart, kinds in ((2.0**-13, ["duplicated"]), (2.0**-11, [])):
        rng, watch, found = np.random.default_rng(0), Watch(3, 2.0), []
        for step in range(10):
            vectors = draw(rng, 3)
            noise = rng.standard_normal((2, 30))
            noise *= apart * np.linalg.norm(vectors[:, 0]) / np.linalg.norm(noise)
            vectors[:, 1] = vectors[:, 0] + noise
            found += watch.add(np.arange(3), grams_of(step, vectors))
        assert [alarm.kind for alarm in found] == kinds


def test_messages_name_rank_layer_and_what_two_ranks_do_not_tell() -> None:
    alarm = Alarm(7, "scaled", (2,), ("fc.weight",), 4.0)
    assert str(alarm) == (
        "step 7, fc.weight: the gradient of rank 2 has 4 times the norm of the others'"
    )
    both = str(Alarm(7, "scaled", (0, 1), (ALL,), 4.0))
    assert "two ranks do not tell which" in both and "others'" in both
    assert "ranks 0 and 2 is the same" in str(Alarm(7, "duplicated", (0, 2), (ALL,), 0.0))
    assert "a, b, c and 2 more:" in str(Alarm(7, "wild", (0,), tuple("abcde"), 0.0))
