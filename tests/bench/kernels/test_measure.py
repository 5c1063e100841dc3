"""Measuring a case: a wrong kernel is refused before it is timed, a wrong peer is left out."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

import kernels
from bench.kernels import bench_packing, bench_projection, bench_reduction, peers_compiled
from bench.kernels.bench_packing import Spec
from bench.kernels.case import Case, WrongAnswer, check_flag
from bench.kernels.measure import COPY, EMPTY, OURS, TWO, TWO_APART, measure
from bench.kernels.peers_projection import Pair
from bench.kernels.timing import DEVICE, Limits, Times
from kernels.gpu.launcher import Kernel
from tests.ptx_emulator.driver import emulated

FAST = Limits(seconds=0.0, fewest=2, most=2)
SHAPES = ((5, 3), (), (70,))


def small_cases() -> list[Case]:
    """Return a case of each kernel, direct and planned, and some with scale, cast and flag."""
    packing = [
        Spec("pack", "aligned", "small", SHAPES),
        Spec("unpack", "aligned", "small", SHAPES),
        Spec("pack", "all", "at once", SHAPES, buffer=torch.bfloat16, scale=1 / 3, misaligned=True),
        Spec("unpack", "found_inf", "small", SHAPES, scale=1 / 3, checked=True),
        Spec("pack", "planned", "planned", SHAPES, scale=1 / 3, planned=True),
        Spec("unpack", "planned", "planned", SHAPES, scale=1 / 3, planned=True, checked=True),
    ]
    reduction = [
        bench_reduction.Spec("sum_n", "n=3", 4000, (torch.float32,) * 3),
        bench_reduction.Spec(
            "scaled_add", "mixed", 4000, (torch.bfloat16, torch.float32), checked=True
        ),
        bench_reduction.Spec("sum_n", "planned", 4000, (torch.float32,) * 2, planned=True),
        bench_reduction.Spec("scaled_add", "planned", 4000, (torch.float32,) * 2, planned=True),
    ]
    projection = [
        bench_projection.Spec(kernel, "fp32", label, 40_000, planned=label == "planned")
        for kernel in ("dot_and_norms", "combine", "adasum")
        for label in ("small", "planned")
    ]
    return [
        *map(bench_packing.case_of, packing),
        *map(bench_reduction.case_of, reduction),
        *(bench_projection.case_of(spec, compiled=False) for spec in projection),
    ]


def gpu_cases() -> list[Case]:
    """Return small cases of the kinds that only a GPU has rows of."""
    odd = bench_projection.Spec("adasum", "wall clock", "small", parts=7, part=33, wall=True)
    fresh = bench_reduction.Spec("sum_n", "n=3 at fresh", 4000, (torch.float32,) * 3, sets=3)
    return [
        bench_packing.case_of(Spec("pack", "wall clock", "small", SHAPES, wall=True)),
        *(
            bench_packing.case_of(
                Spec(kernel, "fresh addresses", "small", SHAPES, wall=True, sets=3)
            )
            for kernel in ("pack", "unpack")
        ),
        bench_reduction.case_of(fresh),
        bench_projection.case_of(odd, compiled=False),
    ]


def test_two_launches_are_planned_with_overlap_and_without():
    pytest.importorskip("triton")
    a, b = (torch.randn(3000) for _ in range(2))
    job = bench_projection.Job(Pair(a, b, torch.empty(3000), (0, 3000)), (0, 3000), planned=True)
    bind = Kernel.bind
    with emulated(80):
        assert bench_projection._in_two_launches(job) == {}
    with emulated(90):
        with mock.patch.object(Kernel, "bind", autospec=True, side_effect=bind) as bound:
            plans = bench_projection._in_two_launches(job)
        expected = kernels.adasum(a, b)
        assert all(torch.equal(plan(), expected) for plan in plans.values())
    assert [*plans] == [TWO, TWO_APART]
    asked = [call.kwargs.get("launch_pdl", False) for call in bound.call_args_list]
    assert asked == [False, True, False, False]


@pytest.mark.parametrize("case", gpu_cases(), ids=lambda case: f"{case.kernel} {case.series}")
def test_measure_of_rows_that_only_a_gpu_has_is_right_in_every_call(case):
    assert case.wall
    row, _ = measure(case, FAST)
    assert row.peers == [peer.name for peer in case.peers]
    for _ in range(3):
        case.ours.check(case.expected)


def test_calls_at_fresh_addresses_take_the_lists_in_turn(monkeypatch):
    seen = []
    pack = kernels.pack
    monkeypatch.setattr(kernels, "pack", lambda given, **o: seen.append(given) or pack(given, **o))
    case = bench_packing.case_of(Spec("pack", "fresh", "small", SHAPES, wall=True, sets=3))
    for _ in range(6):
        case.ours.call()
    addresses = [tuple(tensor.data_ptr() for tensor in given) for given in seen]
    assert len({*addresses}) == 3 and addresses[:3] == addresses[3:]
    assert not any(each.capturable for each in (case.ours, *case.peers))


def compiled_cases() -> list[Case]:
    """Return a small case of each kernel whose last peer is torch.compile's."""
    bf16 = torch.bfloat16
    packing = [
        Spec(kernel, "all", "at once", SHAPES, buffer=bf16, scale=1 / 3, checked=True)
        for kernel in ("pack", "unpack")
    ]
    reduction = [
        bench_reduction.Spec("sum_n", "bf16", 4000, (bf16,) * 3, out=bf16, scale=0.3, checked=True),
        bench_reduction.Spec("scaled_add", "mixed", 4000, (bf16, torch.float32)),
    ]
    projection = [
        bench_projection.Spec("dot_and_norms", "fp32", "small", 40_000),
        bench_projection.Spec("combine", "fp32", "small", 40_000),
        bench_projection.Spec("adasum", "segments", "small", parts=2, part=1000),
    ]
    return [
        *(bench_packing.case_of(spec, compiled=True) for spec in packing),
        *(bench_reduction.case_of(spec, compiled=True) for spec in reduction),
        *(bench_projection.case_of(spec, compiled=True) for spec in projection),
    ]


@pytest.mark.slow
def test_torch_compile_is_a_right_peer_of_every_kernel():
    for case in compiled_cases():
        peer = case.peers[-1]
        assert peer.name == peers_compiled.COMPILED
        peer.check(case.expected)


@pytest.mark.slow
def test_torch_compile_reports_what_is_not_finite():
    tensors, out, flag = [torch.ones(8), torch.ones(8)], torch.empty(8), torch.zeros(())
    peer = peers_compiled.weighted_sum(tensors, (1.0, 0.5), out, flag, 0.0)
    check_flag(peer.call, flag, tensors[0])


def test_torch_compile_of_many_tensors_is_left_out_with_its_reason():
    case = bench_packing.case_of(Spec("pack", "many", "many", ((3,),) * 65), compiled=True)
    row, _ = measure(case, FAST)
    assert row.notes["torch.compile"] == "left out: compiling more than 64 tensors takes minutes"


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.kernel} {case.label}")
def test_measure_of_each_kernel_times_it_beside_all_its_peers(case):
    row, samples = measure(case, FAST)
    left_out = {name: note for name, note in row.notes.items() if note.startswith("left out")}
    # On CUDA torch has no _chunk_cat from every dtype to every other.
    assert {name for name in left_out if DEVICE == "cpu" or "_chunk_cat" not in name} == set()
    assert row.peers == [peer.name for peer in case.peers if peer.name not in left_out]
    assert row.peers
    assert set(row.times) - {EMPTY} == {OURS, COPY, *row.peers, *case.beside}
    assert all(times.rounds == 2 and times.median > 0 for times in row.times.values())
    assert len(samples) == 2 and Times.of(samples) == row.times[OURS]
    assert row.traffic > 0 and row.fraction > 0


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.kernel} {case.label}")
def test_measure_of_a_kernel_that_writes_nothing_raises_before_timing(case):
    result = case.ours.call()
    if case.kernel == "dot_and_norms":
        result = torch.full_like(result, torch.nan)
    timed = []
    idle = dataclasses.replace(case.ours, call=lambda: result)
    peer = dataclasses.replace(case.peers[0], call=lambda: timed.append(1))
    with pytest.raises(WrongAnswer, match="ours: an element"):
        measure(dataclasses.replace(case, ours=idle, peers=[peer]), FAST)
    assert not timed


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.kernel} {case.label}")
def test_measure_of_a_kernel_with_one_element_off_raises(case):
    def off() -> object:
        result = case.ours.call()
        for piece in case.ours.pieces(result):
            if piece.numel():
                piece.view(-1)[-1] *= 1.01
                break
        return result

    wrong = dataclasses.replace(case.ours, call=off)
    with pytest.raises(WrongAnswer, match=r"1 of \d+ are wrong"):
        measure(dataclasses.replace(case, ours=wrong), FAST)


@pytest.mark.parametrize(("extra", "complaint"), [(1, "more elements"), (-1, "fewer elements")])
def test_measure_of_an_answer_of_another_length_raises(extra, complaint):
    case = next(case for case in small_cases() if case.kernel == "sum_n")
    longer = torch.cat([case.ours.call(), case.ours.call()])[: 1000 + extra]
    wrong = dataclasses.replace(case.ours, call=lambda: longer)
    with pytest.raises(WrongAnswer, match=complaint):
        measure(dataclasses.replace(case, ours=wrong), FAST)


def test_measure_of_pack_with_padding_not_zero_raises():
    case = bench_packing.case_of(Spec("pack", "aligned", "small", SHAPES))

    def dirty() -> torch.Tensor:
        buffer = case.ours.call()
        buffer[15] = 1.0
        return buffer

    wrong = dataclasses.replace(case.ours, call=dirty)
    with pytest.raises(WrongAnswer, match="padding"):
        measure(dataclasses.replace(case, ours=wrong), FAST)


def test_peer_that_is_wrong_or_fails_is_left_out_and_named():
    case = small_cases()[0]

    def fail() -> None:
        raise RuntimeError("not built in\nwith details")

    peers = [
        dataclasses.replace(case.peers[0], name="idle", call=lambda: None),
        dataclasses.replace(case.peers[0], name="missing", call=fail),
        dataclasses.replace(case.peers[0], name="gone", call=lambda: torch.no_such_function),
        case.peers[1],
    ]
    row, _ = measure(dataclasses.replace(case, peers=peers), FAST)
    assert row.peers == [case.peers[1].name]
    assert row.notes["missing"] == "left out: not built in"
    assert "no_such_function" in row.notes["gone"]
    assert row.notes["idle"].startswith("left out: idle: an element is nan")


@pytest.mark.parametrize("answers", [(0.0, 0.0), (1.0, 1.0)])
def test_flag_that_is_never_or_always_set_raises(answers):
    flag, source = torch.zeros(()), torch.ones(4)
    said = iter(answers)
    with pytest.raises(WrongAnswer, match="found_inf"):
        check_flag(lambda: flag.fill_(next(said)), flag, source)
    assert torch.equal(source, torch.ones(4))


def test_rows_of_each_bench_have_distinct_names():
    for module in (bench_packing, bench_reduction, bench_projection):
        names = [str(spec) for spec in module.SPECS]
        assert len(set(names)) == len(names)


def test_rows_that_only_a_gpu_has_have_distinct_names(monkeypatch):
    between = [9_000_000, 12_000_000, 15_000_000, 25 << 20]
    monkeypatch.setattr(bench_projection, "BETWEEN", between)
    monkeypatch.setattr(bench_projection, "ADASUM_SIZES", between)
    for module in (bench_packing, bench_reduction, bench_projection):
        monkeypatch.setattr(module, "DEVICE", "cuda")
    specs = [
        *bench_packing._specs("pack"),
        *bench_packing._specs("unpack"),
        *bench_reduction._specs(),
        *bench_projection._specs(),
    ]
    names = [str(spec) for spec in specs]
    assert len(set(names)) == len(names)
    wanted = {
        *("adasum fp32 9 MB", "adasum fp32 12 MB", "adasum fp32 15 MB", "adasum fp32 25 MiB"),
        *("adasum 160 segments on chip", "adasum 160 segments on chip, at odd offsets"),
        *("pack 160 tensors by wall clock", "unpack 160 tensors by wall clock"),
        *("adasum 160 segments by wall clock", "sum_n n=8 at fresh addresses 64 KiB"),
        *("pack 16 tensors at fresh addresses", "unpack 160 tensors at fresh addresses"),
    }
    assert wanted <= {*names}
