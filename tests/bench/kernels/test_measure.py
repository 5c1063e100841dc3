"""A wrong kernel is refused before it is timed, a wrong peer is left out, and rows have figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.kernels import (
    bench_gram,
    bench_packing,
    bench_projection,
    bench_reduction,
    case,
    peers_compiled,
    report,
)
from bench.kernels.bench_packing import Spec
from bench.kernels.bench_reduction import _spec
from bench.kernels.case import WrongAnswer
from bench.kernels.goals import GOALS
from bench.kernels.judging import MET, NOT_MEASURED, NOT_MET, PARTLY, judge
from bench.kernels.measure import COPY, EMPTY, OURS, Row, measure
from bench.kernels.timing import DEVICE, Limits, Times

FAST = Limits(seconds=0.0, fewest=2, most=2)
SHAPES = ((5, 3), (), (70,))
FP32, BF16 = torch.float32, torch.bfloat16


def _projection(kernel: str, label: str = "small", **options: object) -> case.Spec:
    size = 0 if options.get("parts") else 40_000
    return bench_projection.Spec(kernel, "fp32", label, size, **options)


BOTH, SUMS = ("pack", "unpack"), ("sum_n", "scaled_add")
COMPILED = [
    *(Spec(k, "all", "all", SHAPES, buffer=BF16, scale=1 / 3, checked=True) for k in BOTH),
    _spec("sum_n", "bf16", 4000, (BF16,) * 3, out=BF16, scale=0.3, checked=True),
    _spec("scaled_add", "mixed", 4000, (BF16, FP32)),
    *map(_projection, ("dot_and_norms", "combine")),
    _projection("adasum", parts=2, part=1000),
]
# Each kernel, direct and planned; scale, cast, flag; and what a GPU alone has.
SPECS = [
    *COMPILED,
    *(Spec(kernel, "aligned", "small", SHAPES) for kernel in BOTH),
    Spec("pack", "misaligned", "misaligned", SHAPES, misaligned=True),
    *(Spec(k, "planned", "planned", SHAPES, scale=1 / 3, planned=True) for k in BOTH),
    *(_spec(kernel, "planned", 4000, (FP32,) * 2, planned=True) for kernel in SUMS),
    *(_projection(k, "planned", planned=True) for k in ("dot_and_norms", "combine", "adasum")),
    *(Spec(kernel, "fresh", "fresh", SHAPES, wall=True, sets=3) for kernel in BOTH),
    _spec("sum_n", "fresh", 4000, (FP32,) * 3, sets=3, wall=True),
    *(
        bench_gram.Spec(kernel, "small", "small", size=40_000, count=3, planned=planned)
        for kernel in ("gram", "weighted_sum")
        for planned in (False, True)
    ),
]


def case_of(spec: case.Spec, compiled: bool = False) -> case.Case:
    modules = bench_packing, bench_reduction, bench_projection, bench_gram
    (module,) = (each for each in modules if isinstance(spec, each.Spec))
    return module.case_of(spec, compiled)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_measure_times_a_right_kernel_beside_all_its_peers_and_refuses_a_wrong_one(spec):
    case = case_of(spec)
    row, samples = measure(case, FAST)
    left_out = {name: note for name, note in row.notes.items() if note.startswith("left out")}
    # On CUDA torch has no _chunk_cat from every dtype to every other.
    assert {name for name in left_out if DEVICE == "cpu" or "_chunk_cat" not in name} == set()
    assert row.peers and row.peers == [each.name for each in case.peers if each.name in row.peers]
    assert set(row.times) - {EMPTY} == {OURS, COPY, *row.peers, *case.beside}
    assert len(samples) == 2 and Times.of(samples) == row.times[OURS]
    assert row.traffic > 0 and row.fraction > 0
    timed: list[int] = []
    peer = dataclasses.replace(case.peers[0], call=lambda: timed.append(1))

    def off() -> object:
        result = case.ours.call()
        piece = next(piece for piece in case.ours.pieces(result) if piece.numel())
        piece.view(-1)[-1] = piece.view(-1)[-1] * 1.01 + 0.01
        return result

    idle = case.ours.call()
    if case.spec.kernel in ("dot_and_norms", "gram"):
        idle = torch.full_like(idle, torch.nan)
    for wrong in (off, lambda: idle):
        bad = dataclasses.replace(case.ours, call=wrong)
        with pytest.raises(WrongAnswer, match=r"ours: an element is .* are wrong"):
            measure(dataclasses.replace(case, ours=bad, peers=[peer]), FAST)
    assert not timed


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_torch_compile_is_a_right_peer_of_every_kernel(spec):
    case = case_of(spec, compiled=True)
    assert case.peers[-1].name == peers_compiled.COMPILED
    case.peers[-1].check(case.expected)


def test_peer_that_is_wrong_or_fails_is_left_out_and_named():
    case = case_of(Spec("pack", "aligned", "small", SHAPES))

    def fail() -> None:
        raise RuntimeError("not built in\nwith details")

    peers = [
        dataclasses.replace(case.peers[0], name="idle", call=lambda: None),
        dataclasses.replace(case.peers[0], name="missing", call=fail),
        case.peers[1],
    ]
    row, _ = measure(dataclasses.replace(case, peers=peers), FAST)
    assert row.peers == [case.peers[1].name]
    assert row.notes["missing"] == "left out: not built in"
    assert row.notes["idle"].startswith("left out: idle: an element is nan")


def row_of(kernel="pack", label="aligned 64 MiB", size=64 << 20, peers=("slow", "fast"), **times):
    """Return a row: ours takes 128 us for 256 MB, a copy of 2 GB 0.8 ms: 2.0 of 2.5 TB/s."""
    seconds = {OURS: 128e-6, COPY: 800e-6, EMPTY: 4e-6, "slow": 512e-6, "fast": 192e-6} | times
    found = {name: Times(s, 0.9 * s, 1.1 * s, 9) for name, s in seconds.items()}
    hosts = {OURS: 12e-6, "fast": 30e-6}
    traffic = 256_000_000, 1 << 24, 8
    return Row(kernel, "aligned", label, size, *traffic, found, [*peers], 2_000_000_000, hosts)


def test_goals_are_met_by_figures_on_their_side_of_the_threshold():
    rows = [row_of(), row_of(label="other", ours=32e-6), row_of("unpack", ours=1.0)]
    assert Times.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Times(3.0, 2.0, 4.0, 5)
    # Of the roof, and over the best peer.
    assert (rows[0].fraction, rows[0].ratio) == (pytest.approx(0.8), pytest.approx(1.5))
    (goal,) = (each for each in GOALS["cuda"] if each.name.endswith("each row"))
    pack = goal._replace(chosen=lambda row: row.kernel == "pack")
    assert judge(pack._replace(threshold=1.5), rows).status == MET
    missed = judge(pack._replace(threshold=1.6), rows)
    assert (missed.status, missed.missed, missed.row) == (NOT_MET, 1, "pack aligned 64 MiB")
    assert judge(pack._replace(threshold=2.9, mean=True), rows).status == MET
    assert judge(pack._replace(threshold=5.9, at_most=True), rows).status == NOT_MET
    assert judge(pack, rows[2:]).status == NOT_MEASURED
    some = pack._replace(figure=lambda row: row.ratio if row.label != "other" else None)
    assert judge(some, rows).status == PARTLY


def test_rows_written_are_read_again_and_one_cut_short_is_measured_anew(tmp_path):
    first, second = row_of(), row_of("unpack")
    report.append(first, tmp_path, first=True)
    report.append(second, tmp_path, first=False)
    path = tmp_path / report.UNFINISHED
    path.write_text(path.read_text() + '{"kernel": "sum')
    assert [row.key for row in report.unfinished(tmp_path)] == [first.key, second.key]
    meta = {"device": "Made-Up GPU", "kind": "cuda", "torch": "0", "date": "never"}
    report.write([first, second], meta, tmp_path)
    cells = next(
        line for line in (tmp_path / "tables.md").read_text().splitlines() if "64 M" in line
    )
    for figure in ("128.0", "115.2-140.8", "2000.0", "0.80", "fast", "1.50"):
        assert f" {figure} " in cells
