"""The goals of the kernels as data: which rows, which figure of a row, which threshold.

What was predicted of a GPU before any had run this stands with the goal that measures it;
bench/NOTES.md quotes each text.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from bench.kernels.case import DIRECT
from bench.kernels.inputs import FRESH, PLANNED, WALL
from bench.kernels.judging import Goal
from bench.kernels.measure import EMPTY, ONE_DOT, ONE_SEGMENT, OURS, TWO, TWO_APART, Row
from bench.kernels.peers_compiled import COMPILED
from bench.kernels.peers_elementwise import CHAIN
from bench.kernels.peers_projection import EAGER, THREE_DOTS

PACKING, SUMS = ("pack", "unpack"), ("sum_n", "scaled_add")
LARGE = 64_000_000
ON_CHIP = 2 << 20
_CPU_KERNELS = (
    *("pack", "unpack", "sum_n", "scaled_add", "combine", "adasum", "gram", "weighted_sum"),
)


def singled_out(kernel: str, series: str, size: int) -> bool:
    """Return whether a goal is about such rows in particular, not about all rows of a kernel."""
    named = ("many small", "models", "segments", PLANNED, "planned model", "planned segments", WALL)
    return kernel == "adasum" or size >= LARGE or series in named or FRESH in series


def _of(*kernels: str, least: int = 0) -> Callable[[Row], bool]:
    """Choose these kernels' rows of `least` bytes or more."""
    return lambda row: row.kernel in kernels and row.size >= least


def _packing(misaligned: bool) -> Callable[[Row], bool]:
    large = _of(*PACKING, least=LARGE)
    return lambda row: large(row) and (row.series == "misaligned") == misaligned


def _special_sums(row: Row) -> bool:
    special = " to " in row.series or "found_inf" in row.series
    return _of(*SUMS, least=LARGE)(row) and special


def _many_small(text: str) -> Callable[[Row], bool]:
    return lambda row: row.kernel in PACKING and text in row.label


def _eight(row: Row) -> bool:
    return row.kernel == "sum_n" and row.tensors == 8 and FRESH not in row.series


def _one_segment(row: Row) -> bool:
    return row.kernel == "adasum" and row.tensors == 1


def _on_chip(row: Row) -> bool:
    return _one_segment(row) and row.elements <= ON_CHIP


def _series(kernel: str, series: str) -> Callable[[Row], bool]:
    return lambda row: row.kernel == kernel and row.series == series


def _planned(row: Row) -> bool:
    return DIRECT in row.times


def _over_best(prefix: str) -> Callable[[Row], float | None]:
    """Return the figure: time of the fastest peer whose name begins so, over ours."""

    def figure(row: Row) -> float | None:
        ratios = [row.times[name].median for name in row.peers if name.startswith(prefix)]
        return min(ratios) / row.seconds if ratios else None

    return figure


def _over_three_units(row: Row) -> float | None:
    """Return our time less that of an empty launch, over the roof of three units of traffic."""
    empty = row.times.get(EMPTY)
    return (row.seconds - empty.median) / (row.traffic / row.roof) if empty else None


def _over_three_units_and_launch(row: Row) -> float | None:
    """Return our time over the roof of three units of traffic and an empty launch."""
    empty = row.times.get(EMPTY)
    return row.seconds / (row.traffic / row.roof + empty.median) if empty else None


def _slowdown(name: str) -> Callable[[Row], float | None]:
    """Return the figure: our time over that of `name`."""

    def figure(row: Row) -> float | None:
        ratio = row.over(name)
        return None if ratio is None else 1 / ratio

    return figure


def _gain_of_overlap(row: Row) -> float | None:
    """Return the time of two launches that do not overlap over that of two that do."""
    both = TWO in row.times and TWO_APART in row.times
    return row.times[TWO_APART].median / row.times[TWO].median if both else None


def _host_microseconds(row: Row) -> float | None:
    return row.hosts[OURS] * 1e6 if OURS in row.hosts else None


def _beside_tensors(row: Row) -> float | None:
    """The host's time without what a run takes to ask each tensor where it lies."""
    found = _host_microseconds(row)
    return None if found is None else found - 0.1 * row.tensors


_ratio, _fraction = attrgetter("ratio"), attrgetter("fraction")

GPU = (
    Goal(
        "pack, unpack of 64 MB or more: fraction of the roof",
        *(_packing(misaligned=False), _fraction, 0.95),
        predicted="pack and unpack move 0.95 of the copy roof from 64 MB on.",
    ),
    Goal(
        "the same, misaligned",
        *(_packing(misaligned=True), _fraction, 0.85),
        predicted="Misaligned, pack and unpack move 0.85 in float32.",
    ),
    Goal(
        "1,000 tensors of 1 KiB: times an empty launch",
        *(_many_small("1,000 x"), _slowdown(EMPTY), 2.0, True),
        predicted="1,000 tensors of 1 KiB take at most two empty launches.",
    ),
    Goal(
        "10,000 tensors of 64 B: right, in microseconds",
        *(_many_small("10,000 x"), lambda row: row.seconds * 1e6, None, True),
    ),
    Goal("pack, unpack: best peer over ours, each row", _of(*PACKING), _ratio, 1.0),
    Goal(
        "pack, unpack: best peer over ours, geometric mean", _of(*PACKING), _ratio, 1.3, mean=True
    ),
    Goal(
        "sum_n, scaled_add of tensors of 64 MB or more: fraction of the roof",
        *(_of(*SUMS, least=LARGE), _fraction, 0.95),
        predicted="sum_n and scaled_add move 0.95 of the copy roof from 64 MB on.",
    ),
    Goal("the same, mixed dtypes and found_inf", _special_sums, _fraction, 0.95),
    Goal(
        "dot_and_norms of 64 MB or more: fraction of the read-only roof",
        *(_of("dot_and_norms", least=LARGE), _fraction, 0.9),
        predicted="dot_and_norms reads at 0.9 of the read-only roof from 64 MB on.",
    ),
    Goal(
        "gram of up to 8, 64 MB or more together: fraction of the read-only roof",
        lambda row: row.kernel == "gram" and row.traffic >= LARGE and "n=16" not in row.label,
        _fraction,
        0.9,
    ),
    Goal(
        "weighted_sum, 64 MB or more together: fraction of the roof",
        lambda row: row.kernel == "weighted_sum" and row.traffic >= LARGE,
        _fraction,
        0.9,
    ),
    Goal(
        "sum_n of 8: chain of adds over ours",
        *(_eight, _over_best(CHAIN), 2.0),
        predicted="sum_n of 8 is three times as fast as a chain of additions.",
        predicted_threshold=3.0,
    ),
    Goal(
        "adasum on chip: (time - empty launch) over the three-unit roof",
        *(_on_chip, _over_three_units, 1.2, True),
        predicted="adasum of up to 2 Mi elements takes, less an empty launch, 1.2 of the "
        "three-unit roof.",
    ),
    Goal(
        "adasum on chip: time over the three-unit roof and an empty launch",
        *(_on_chip, _over_three_units_and_launch, 1.5, True),
        predicted="With that launch it takes at most 1.5 of that roof and the launch.",
    ),
    Goal(
        "adasum of 160 segments on chip over one segment",
        *(_series("adasum", "segments on chip"), _slowdown(ONE_SEGMENT), 1.05, True),
        predicted="160 segments on chip take at most 1.05 of the time of one.",
    ),
    Goal(
        "adasum beyond: fraction of the five-unit roof",
        lambda row: _one_segment(row) and not _on_chip(row),
        # Five units of traffic move there; `adasum_bytes` counts three.
        *(lambda row: row.fraction * 5 / 3, 0.93),
        predicted="adasum beyond the chip, a bucket of 25 MiB say, moves 0.93 of the roof of five "
        "units.",
    ),
    Goal(
        "adasum of a model's segments over one segment",
        *(_series("adasum", "segments"), _slowdown(ONE_SEGMENT), 1.05, True),
        predicted="A model's segments take at most 1.05 of the time of one segment.",
    ),
    Goal(
        "adasum of up to 1 MiB in two launches: without overlap over with it",
        *(lambda row: _one_segment(row) and _planned(row), _gain_of_overlap, 1.0),
        mean=True,
        predicted="adasum of up to 1 MiB in two launches takes no longer where they overlap.",
    ),
    Goal(
        "adasum: torch eager over ours",
        *(_one_segment, _over_best(EAGER), 3.0),
        predicted="adasum is three times as fast as torch in eager mode, or more.",
    ),
    Goal(
        "adasum: torch.compile over ours",
        *(_one_segment, _over_best(COMPILED), 1.5),
        predicted="adasum is 1.5 times as fast as torch.compile, or more.",
    ),
    Goal(
        "host cost of a call on up to 16 tensors, microseconds",
        *(lambda row: row.tensors <= 16 and FRESH not in row.label, _host_microseconds, 25.0, True),
    ),
    Goal(
        "host cost of a call at fresh addresses, microseconds",
        *(lambda row: FRESH in row.label, _host_microseconds, None, True),
    ),
    Goal(
        "host cost of a call on a model's list, microseconds",
        *(lambda row: row.series in ("models", "segments"), _host_microseconds, 25.0, True),
    ),
    Goal(
        "host cost of a planned run beside 0.1 a tensor, microseconds",
        *(_planned, _beside_tensors, 10.0, True),
        predicted="A planned run costs the host at most 10 microseconds and 0.1 a tensor, the "
        "driver's part included.",
    ),
    Goal(
        "replays inside a CUDA graph (1: yes), every kernel",
        *(lambda row: row.captured is not None, lambda row: float(bool(row.captured)), 1.0),
        predicted="Every kernel replays inside a CUDA graph with the right answer.",
    ),
)
CPU = (
    *(
        Goal(f"CPU {kernel}: best torch formulation over ours", _of(kernel), _ratio, 0.9)
        for kernel in _CPU_KERNELS
    ),
    *(
        Goal(f"CPU {kernel}, 1 MiB or more: the same", _of(kernel, least=1 << 20), _ratio, 0.9)
        for kernel in _CPU_KERNELS
    ),
    Goal(
        "CPU plans: a direct call over a planned run", _planned, lambda row: row.over(DIRECT), None
    ),
    Goal(
        "CPU dot_and_norms: ours over three float32 torch.dot",
        *(_series("dot_and_norms", "fp32"), _slowdown(THREE_DOTS), 2.0, True),
    ),
    Goal(
        "CPU dot_and_norms: ours over one float32 torch.dot",
        *(_series("dot_and_norms", "fp32"), _slowdown(ONE_DOT), None, True),
    ),
)
GOALS = {"cuda": GPU, "cpu": CPU}
