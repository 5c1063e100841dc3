"""The goals of the kernels as data: which rows, which figure of a row, which threshold."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from bench.kernels.inputs import FRESH, PLANNED, WALL
from bench.kernels.judging import Goal
from bench.kernels.measure import DIRECT, EMPTY, ONE_DOT, ONE_SEGMENT, OURS, TWO, TWO_APART, Row
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


def _straight(row: Row) -> bool:
    return _of(*PACKING, least=LARGE)(row) and row.series != "misaligned"


def _misaligned(row: Row) -> bool:
    return _of(*PACKING, least=LARGE)(row) and row.series == "misaligned"


def _special_sums(row: Row) -> bool:
    special = " to " in row.series or "found_inf" in row.series
    return _of(*SUMS, least=LARGE)(row) and special


def _one_segment(row: Row) -> bool:
    return row.kernel == "adasum" and row.tensors == 1


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


def _of_five_units(row: Row) -> float:
    """Return the fraction of the roof with five units of traffic; `adasum_bytes` counts three."""
    return row.fraction * 5 / 3


def _slowdown(name: str) -> Callable[[Row], float | None]:
    """Return the figure: our time over that of `name`."""

    def figure(row: Row) -> float | None:
        ratio = row.over(name)
        return None if ratio is None else 1 / ratio

    return figure


def _planned(row: Row) -> bool:
    return DIRECT in row.times


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
    Goal("pack, unpack of 64 MB or more: fraction of the roof", _straight, _fraction, 0.95),
    Goal("the same, misaligned", _misaligned, _fraction, 0.85),
    Goal(
        "1,000 tensors of 1 KiB: times an empty launch",
        lambda row: row.kernel in PACKING and "1,000 x" in row.label,
        _slowdown(EMPTY),
        2.0,
        True,
    ),
    Goal(
        "10,000 tensors of 64 B: right, in microseconds",
        lambda row: row.kernel in PACKING and "10,000 x" in row.label,
        lambda row: row.seconds * 1e6,
        None,
        True,
    ),
    Goal("pack, unpack: best peer over ours, each row", _of(*PACKING), _ratio, 1.0),
    Goal(
        "pack, unpack: best peer over ours, geometric mean", _of(*PACKING), _ratio, 1.3, mean=True
    ),
    Goal(
        "sum_n, scaled_add of tensors of 64 MB or more: fraction of the roof",
        _of(*SUMS, least=LARGE),
        _fraction,
        0.95,
    ),
    Goal("the same, mixed dtypes and found_inf", _special_sums, _fraction, 0.95),
    Goal(
        "dot_and_norms of 64 MB or more: fraction of the read-only roof",
        _of("dot_and_norms", least=LARGE),
        _fraction,
        0.9,
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
        lambda row: row.kernel == "sum_n" and row.tensors == 8 and FRESH not in row.series,
        _over_best(CHAIN),
        2.0,
    ),
    Goal(
        "adasum on chip: (time - empty launch) over the three-unit roof",
        lambda row: _one_segment(row) and row.elements <= ON_CHIP,
        _over_three_units,
        1.2,
        True,
    ),
    Goal(
        "adasum on chip: time over the three-unit roof and an empty launch",
        lambda row: _one_segment(row) and row.elements <= ON_CHIP,
        _over_three_units_and_launch,
        1.5,
        True,
    ),
    Goal(
        "adasum of 160 segments on chip over one segment",
        lambda row: row.kernel == "adasum" and row.series == "segments on chip",
        _slowdown(ONE_SEGMENT),
        1.05,
        True,
    ),
    Goal(
        "adasum beyond: fraction of the five-unit roof",
        lambda row: _one_segment(row) and row.elements > ON_CHIP,
        _of_five_units,
        0.93,
    ),
    Goal(
        "adasum of a model's segments over one segment",
        lambda row: row.kernel == "adasum" and row.series == "segments",
        _slowdown(ONE_SEGMENT),
        1.05,
        True,
    ),
    Goal(
        "adasum of up to 1 MiB in two launches: without overlap over with it",
        lambda row: _one_segment(row) and _planned(row),
        _gain_of_overlap,
        1.0,
        mean=True,
    ),
    Goal("adasum: torch eager over ours", _one_segment, _over_best(EAGER), 3.0),
    Goal("adasum: torch.compile over ours", _one_segment, _over_best(COMPILED), 1.5),
    Goal(
        "host cost of a call on up to 16 tensors, microseconds",
        lambda row: row.tensors <= 16 and FRESH not in row.label,
        _host_microseconds,
        25.0,
        True,
    ),
    Goal(
        "host cost of a call at fresh addresses, microseconds",
        lambda row: FRESH in row.label,
        _host_microseconds,
        None,
        True,
    ),
    Goal(
        "host cost of a call on a model's list, microseconds",
        lambda row: row.series in ("models", "segments"),
        _host_microseconds,
        25.0,
        True,
    ),
    Goal(
        "host cost of a planned run beside 0.1 a tensor, microseconds",
        _planned,
        _beside_tensors,
        10.0,
        True,
    ),
    Goal(
        "replays inside a CUDA graph (1: yes), every kernel",
        lambda row: row.captured is not None,
        lambda row: float(bool(row.captured)),
        1.0,
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
        lambda row: row.kernel == "dot_and_norms" and row.series == "fp32",
        _slowdown(THREE_DOTS),
        2.0,
        True,
    ),
    Goal(
        "CPU dot_and_norms: ours over one float32 torch.dot",
        lambda row: row.kernel == "dot_and_norms" and row.series == "fp32",
        _slowdown(ONE_DOT),
        None,
        True,
    ),
)
GOALS = {"cuda": GPU, "cpu": CPU}
